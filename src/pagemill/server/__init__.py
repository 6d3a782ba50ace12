"""OpenAI's HTTP API over an engine, and a web page."""
