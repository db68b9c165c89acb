"""The byte-level Llama that comes with the library, as `examples/byte_llama` has trained it."""

from pathlib import Path

from ...models import Llama

FOLDER = Path(__file__).parent / "model"


def byte_llama() -> Llama:
    """The model, float32. Raises `ValueError`, as `Llama.load` does, where its files are not as they were."""
    return Llama.load(FOLDER, progress=False)
