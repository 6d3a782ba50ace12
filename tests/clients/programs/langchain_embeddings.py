"""LangChain's standard tests of an embedding model, run with pytest by test_other_clients.py."""

import os
from typing import Any

from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests


class TestOverHttp(EmbeddingsIntegrationTests):
    """Texts go as they are: the client has OpenAI's tokenizer, not the model's."""

    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": os.environ["PAGEMILL_MODEL"], "check_embedding_ctx_length": False}
