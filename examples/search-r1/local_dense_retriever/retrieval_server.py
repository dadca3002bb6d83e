"""The retrieval server: documents of a JSONL corpus by BM25, or by a faiss index and an encoder.

    python retrieval_server.py --corpus_path corpus.jsonl --topk 3                     # BM25 (bm25s)
    python retrieval_server.py --corpus_path wiki-18.jsonl --index_path e5_Flat.index --retriever_name e5

A line of the corpus is `{"id", "contents": "\"Title\"\\ntext"}`. POST /retrieve `{"queries": [str], "topk": int or
null, "return_scores": bool}` -> `{"result": [[document, ...], ...]}`, with scores `[[{"document", "score"}, ...]]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

logger = logging.getLogger(__name__)
MOST_QUERIES, MOST_DOCUMENTS, QUERY_CHARS = 512, 100, 2000
Found = list[tuple[int, float]]


class Retriever(Protocol):
    """Finds rows of the corpus."""

    def find(self, queries: Sequence[str], topk: int) -> list[Found]:
        """(row, score) of the best documents of each query, best first."""


class BM25Retriever:
    """Words in common, weighted as BM25 does."""

    def __init__(self, contents: Sequence[str]) -> None:
        import bm25s

        self._bm25s, self._size = bm25s, len(contents)
        self._index = bm25s.BM25()
        self._index.index(self._tokens(contents), show_progress=False)

    def _tokens(self, texts: Sequence[str]) -> Any:
        return self._bm25s.tokenize(list(texts), stopwords=None, return_ids=False, show_progress=False)

    def find(self, queries: Sequence[str], topk: int) -> list[Found]:
        """(row, score) of the best documents; those that have no word of the query are left out."""
        rows, scores = self._index.retrieve(self._tokens(queries), k=min(topk, self._size), show_progress=False)
        return [
            [(int(row), float(score)) for row, score in zip(*found, strict=True) if score > 0]
            for found in zip(rows, scores, strict=True)
        ]


class DenseRetriever:
    """Nearest vectors in a faiss index, queries encoded as E5 wants them."""

    def __init__(self, index_path: Path, model: str, *, on_gpu: bool) -> None:
        import faiss
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._torch, self._device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self._index = faiss.read_index(str(index_path))
        if on_gpu:
            self._index = faiss.index_cpu_to_all_gpus(self._index)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model).eval().to(self._device)

    def encode(self, queries: Sequence[str]) -> Any:
        """Vectors of length 1 as E5 makes them, float32 [Q, H]."""
        texts = [f"query: {query}" for query in queries]
        with self._torch.no_grad():
            batch = self._tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            batch = batch.to(self._device)
            states, mask = self._model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(1) / mask.sum(1)
            return self._torch.nn.functional.normalize(mean, dim=-1).float().cpu().numpy()

    def find(self, queries: Sequence[str], topk: int) -> list[Found]:
        """(row, score) of the best documents."""
        scores, rows = self._index.search(self.encode(queries), topk)
        return [
            [(int(row), float(score)) for row, score in zip(*found, strict=True) if row >= 0]
            for found in zip(rows, scores, strict=True)
        ]


def read_corpus(path: Path) -> list[dict[str, Any]]:
    """The documents.

    Raises:
        ValueError: a line is no document, or there is none.
    """
    documents = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            document = json.loads(line)
            if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
                raise ValueError(f'{path}, line {number}: no document {{"id", "contents"}}: {line[:80]!r}')
            documents.append(document)
    if not documents:
        raise ValueError(f"{path} has no document")
    return documents


def make_app(retriever: Retriever, documents: Sequence[dict[str, Any]], *, topk: int) -> web.Application:
    """The HTTP application; one request at a time is looked up, in a thread."""
    turn = asyncio.Lock()

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            queries, count = _checked(body, topk)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        async with turn:
            found = await asyncio.to_thread(retriever.find, queries, count)
        if body.get("return_scores"):
            result = [[{"document": documents[row], "score": score} for row, score in hits] for hits in found]
        else:
            result = [[documents[row] for row, _ in hits] for hits in found]
        return web.json_response({"result": result})

    app = web.Application(client_max_size=MOST_QUERIES * QUERY_CHARS * 8)
    app.router.add_post("/retrieve", retrieve)
    return app


def _checked(body: Any, topk: int) -> tuple[list[str], int]:
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    queries, count = body.get("queries"), topk if body.get("topk") is None else body["topk"]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError('"queries" must be a list of texts')
    if not 1 <= len(queries) <= MOST_QUERIES:
        raise ValueError(f"{len(queries)} queries: from 1 to {MOST_QUERIES}")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DOCUMENTS:
        raise ValueError(f'"topk" {count!r}: from 1 to {MOST_DOCUMENTS}')
    return [query[:QUERY_CHARS] for query in queries], count


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus_path", type=Path, required=True, help="JSONL, one document a line")
    parser.add_argument("--index_path", type=Path, help="faiss index, for --retriever_name e5")
    parser.add_argument("--topk", type=int, default=3, help="documents of a request that names no number")
    parser.add_argument("--retriever_name", choices=("bm25", "e5"), default="bm25", help="how documents are found")
    parser.add_argument("--retriever_model", default="intfloat/e5-base-v2", help="encoder of e5")
    parser.add_argument("--faiss_gpu", action="store_true", help="hold the faiss index on all GPUs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument("--port_file", type=Path, help="file for the port's number, written once requests are taken")
    return parser


async def serve(args: argparse.Namespace) -> None:
    """Answer until the process ends."""
    documents = read_corpus(args.corpus_path)
    retriever: Retriever
    if args.retriever_name == "bm25":
        retriever = BM25Retriever([document["contents"] for document in documents])
    else:
        retriever = DenseRetriever(args.index_path, args.retriever_model, on_gpu=args.faiss_gpu)
    runner = web.AppRunner(make_app(retriever, documents, topk=args.topk), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port)
    await site.start()
    port = runner.addresses[0][1]
    logger.info("%d documents at http://%s:%d/retrieve", len(documents), args.host, port)
    if args.port_file:
        part = args.port_file.with_suffix(".part")
        part.write_text(f"{port}\n")
        os.replace(part, args.port_file)
    await asyncio.Event().wait()


def main() -> None:
    """Read the command line and serve."""
    logging.basicConfig(level=logging.INFO, format="[retriever] %(message)s")
    parser = build_parser()
    args = parser.parse_args()
    if args.retriever_name == "e5" and args.index_path is None:
        parser.error("--retriever_name e5 needs --index_path")
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
