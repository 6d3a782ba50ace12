"""OpenAI's Responses API over chat's machinery: items for messages, typed events, answers kept in memory."""
