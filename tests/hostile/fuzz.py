"""Coverage-guided fuzzing of file readers: `python tests/hostile/fuzz.py READER [N]`.

Any exception except `QKVError` ends the process with a traceback. Requires atheris (`pip install atheris`).
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["qkv.text", "qkv.data", "qkv.weights", "gguf"]):
    from qkv.data.labeled_texts import read_labeled_texts
    from qkv.errors import QKVError
    from qkv.text.sentencepiece import read_sentencepiece
    from qkv.weights.checkpoint_folder import check_folder_matches_manifest, read_json_object
    from qkv.weights.gguf_file import read_gguf
    from qkv.weights.llama2c import read_llama2c

FOLDER = Path(tempfile.mkdtemp())
READERS = {
    "sentencepiece": (FOLDER / "x.spm", lambda: read_sentencepiece(FOLDER / "x.spm")),
    "labeled": (FOLDER / "x.tsv", lambda: read_labeled_texts(FOLDER / "x.tsv")),
    "manifest": (FOLDER / "manifest.json", lambda: check_folder_matches_manifest(FOLDER)),
    "settings": (FOLDER / "config.json", lambda: read_json_object(FOLDER / "config.json")),
    "gguf": (FOLDER / "x.gguf", lambda: read_gguf(FOLDER / "x.gguf")),
    "llama2c": (FOLDER / "x.bin", lambda: read_llama2c(FOLDER / "x.bin")),
}


def main(reader: str, n: int) -> None:
    file, read = READERS[reader]

    def attempt(data: bytes) -> None:
        file.write_bytes(b"GGUF" + data if reader == "gguf" else data)
        with contextlib.suppress(QKVError):
            read()

    atheris.Setup(
        [sys.argv[0], f"-runs={n}", "-seed=1", "-max_len=2048", "-rss_limit_mb=4096", "-timeout=120"], attempt
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5_000)
