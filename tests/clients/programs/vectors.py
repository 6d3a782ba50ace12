"""LiteLLM, LangChain and the older openai ask for vectors, and get the same ones."""

import math
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices first
import litellm
import openai
from langchain_openai import OpenAIEmbeddings

MODEL = os.environ["PAGEMILL_MODEL"]
TEXTS = ["A cat sleeps.", "A kitten naps.", "Interest rates rose."]


def main() -> None:
    by_litellm = litellm.embedding(
        model="openai/" + MODEL, input=TEXTS, api_base=os.environ["OPENAI_BASE_URL"], api_key="none"
    )
    vectors = [each["embedding"] for each in by_litellm.data]
    assert len(vectors) == 3
    for vector in vectors:
        assert math.isclose(math.hypot(*vector), 1, rel_tol=1e-3)
    near, far = (sum(map(lambda a, b: a * b, vectors[0], other)) for other in vectors[1:])
    assert near > far + 0.2
    by_langchain = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False).embed_documents(TEXTS)
    assert by_langchain == vectors
    shorter = openai.OpenAI().embeddings.create(model=MODEL, input=TEXTS[0], dimensions=64)
    assert len(shorter.data[0].embedding) == 64


main()
