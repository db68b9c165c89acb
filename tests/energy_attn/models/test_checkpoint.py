"""Checkpoints: those of other libraries are read, whole or not at all, and onto a mesh."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import make_mesh
from energy_attn.models import Llama, LlamaConfig, Rope, shard
from tests.support.compare import same
from tests.support.complaints import refused
from tests.support.disk import Killed, contents, failing, meanwhile
from tests.support.flags import spawn
from tests.support.llama import build, leaves_of
from tests.support.selection import few, few_rows

save_file = pytest.importorskip("safetensors.numpy").save_file
load_file = pytest.importorskip("safetensors.numpy").load_file
safe_open = pytest.importorskip("safetensors").safe_open

SIZES = {
    **{"vocab_size": 24, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "attention_bias": True},
}
SCALING = Rope.linear(8.0)
CONFIG = LlamaConfig(**SIZES, rope_scaling=SCALING, eos_token_id=(3, 5))
SAID = {"model_type": "llama", "eos_token_id": [3, 5], **SIZES}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def shapes():
    """The tensors of that configuration, by their names in a checkpoint."""
    found = {"model.embed_tokens.weight": (24, 16), "lm_head.weight": (24, 16)}
    for i in range(2):
        layer = {
            "input_layernorm.weight": (16,),
            "post_attention_layernorm.weight": (16,),
            "self_attn.q_proj.weight": (24, 16),
            "self_attn.k_proj.weight": (12, 16),
            "self_attn.v_proj.weight": (12, 16),
            "self_attn.o_proj.weight": (16, 24),
            "self_attn.q_proj.bias": (24,),
            "self_attn.k_proj.bias": (12,),
            "self_attn.v_proj.bias": (12,),
            "self_attn.o_proj.bias": (16,),
            "mlp.gate_proj.weight": (12, 16),
            "mlp.up_proj.weight": (12, 16),
            "mlp.down_proj.weight": (16, 12),
        }
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (16,)}


def arrays(dtype="float32"):
    draw = np.random.default_rng(0)
    return {name: draw.normal(0, 0.5, shape).astype(dtype) for name, shape in shapes().items()}


def write(folder, tensors, said=None):
    """A checkpoint as others write it: safetensors by its own library."""
    save_file(tensors, folder / WHOLE)
    rope = {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (folder / "config.json").write_text(json.dumps(SAID | rope if said is None else said))
    return folder


def assert_same(model, tensors):
    same(leaves_of(model), tensors)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", few(["float32", "float64", "float16", "bfloat16"], "bfloat16"))
def test_reads_what_others_wrote(dtype, tmp_path):
    """Every weight in its place and its dtype; `dtype` converts."""
    tensors = arrays(getattr(ml_dtypes, dtype, dtype))
    model = Llama.load(write(tmp_path, tensors))
    assert model.config == CONFIG
    assert_same(model, tensors)
    wide = Llama.load(str(tmp_path), dtype="float64")
    assert_same(wide, {name: x.astype("float64") for name, x in tensors.items()})
    # moves to the device of other arrays
    assert not any(leaf.committed for leaf in jax.tree.leaves(model))


def test_float64_without_64_bits(tmp_path, user_settings):
    folder = write(tmp_path, arrays("float64"))
    assert {leaf.dtype for leaf in jax.tree.leaves(Llama.load(folder))} == {jnp.dtype("float32")}


def test_several_files(tmp_path):
    """Files by an index; old frequencies and a copy of the embedding are ignored, as by Hugging Face."""
    tensors = arrays()
    write(tmp_path, tensors)
    (tmp_path / WHOLE).unlink()
    del tensors[HEAD]
    head = tensors[EMBED]
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3) for i in range(2)}
    everything = tensors | old | {HEAD: head}
    where = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(everything)}
    for file in set(where.values()):
        mine = {name: everything[name] for name in where if where[name] == file}
        save_file(mine, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps(SAID | {"tie_word_embeddings": True}))
    model = Llama.load(tmp_path)
    assert model.lm_head is None
    assert_same(model, tensors)


@pytest.mark.parametrize("changed", [0, 23])
def test_head_unlike_the_embedding(changed, tmp_path, monkeypatch):
    """A fine-tuned head beside `tie_word_embeddings: true` that is dropped: transformers uses it."""
    # bytes: 3 rows of 16
    monkeypatch.setattr("energy_attn.distributed.runtime._safetensors._PIECE", 200)
    tensors = arrays()
    tensors[HEAD] = tensors[EMBED].copy()
    tensors[HEAD][changed] += 1
    said = SAID | {"tie_word_embeddings": True}
    with pytest.warns(UserWarning, match=f"{WHOLE}: lm_head.weight .* tie_word_embeddings"):
        model = Llama.load(write(tmp_path, tensors, said))
    assert model.config == dataclasses.replace(CONFIG, rope_scaling=None)
    assert_same(model, tensors)
    model.save(tmp_path)
    assert_same(Llama.load(tmp_path), tensors)


def test_copy_of_the_embedding_in_another_dtype(tmp_path):
    """Equal numbers that are taken for a head of its own."""
    tensors = arrays()
    tensors[EMBED] = tensors[EMBED].astype(np.float16)
    tensors[HEAD] = tensors[EMBED].astype(np.float32)
    model = Llama.load(
        write(tmp_path, tensors, SAID | {"tie_word_embeddings": True}), dtype=np.float32
    )
    assert model.lm_head is None


def test_links_of_a_cache(tmp_path):
    """Hugging Face's cache: a snapshot of links to blobs beside it."""
    tensors, blobs = arrays(), tmp_path / "hub" / "blobs"
    snapshot = tmp_path / "hub" / "snapshots" / "1a2b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write(blobs, tensors)
    for file in (WHOLE, "config.json"):
        (snapshot / file).symlink_to(blobs / file)
    assert_same(Llama.load(snapshot), tensors)


ONES = np.ones((16, 24), np.float32)


def with_tensors(said=None, **changes):
    """A checkpoint with other tensors, or without one, by the names of `NORM` and `QUERY` or their own."""

    def make(folder):
        named = {{"norm": NORM, "query": QUERY}.get(name, name): x for name, x in changes.items()}
        tensors = {name: x for name, x in (arrays() | named).items() if x is not None}
        write(folder, tensors, said)

    return make


def with_header(change):
    """One whose header says something else."""

    def make(folder):
        data = (write(folder, arrays()) / WHOLE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        rewritten(folder / WHOLE, change(header) or header, data[8 + length :])

    return make


def rewritten(file, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def with_file(name, change):
    """One with a file that is something else."""
    return lambda folder: change(write(folder, arrays()) / name)


def by_index(file, name=NORM):
    def make(folder):
        write(folder, arrays())
        (folder / WHOLE).rename(folder / "all.safetensors")
        where = dict.fromkeys(arrays(), "all.safetensors")
        where[name] = file
        (folder / INDEX).write_text(json.dumps({"weight_map": where} if file else []))

    return make


def beside_the_index(name, value):
    """One with a tensor of this name in a file of its own, which the index names for another tensor."""

    def make(folder):
        by_index("all.safetensors")(folder)
        save_file({name: value, "lm_head.rotary_emb.inv_freq": value}, folder / "b.safetensors")
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["lm_head.rotary_emb.inv_freq"] = "b.safetensors"
        (folder / INDEX).write_text(json.dumps(index))

    return make


def partial(count):
    """A file of some weights, which is read, beside an index of all."""

    def make(folder):
        by_index("all.safetensors")(folder)
        names = sorted(arrays(), key=lambda name: name != NORM)[:count]
        save_file({name: arrays()[name] for name in names}, folder / WHOLE)

    return make


def renamed(change):
    """A checkpoint whose names have another prefix."""

    def make(folder):
        write(folder, {change(name): x for name, x in arrays().items()})

    return make


def linked_to_itself(file):
    file.unlink()
    file.symlink_to(file)


def piped(file):
    file.unlink()
    os.mkfifo(file)


def pointer(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 16060\n")


def of_another_save(pattern):
    """One with a file that an older save of the same tensors has left."""

    def make(folder):
        Llama.load(write(folder, arrays())).save(folder, max_shard_size=4000)
        first = sorted(folder.glob(pattern))[0].read_bytes()
        Llama.load(folder).save(folder, max_shard_size=4000)
        sorted(folder.glob(pattern))[0].write_bytes(first)

    return make


BAD_FOLDERS = {
    f"directory: wanted all .*, got none for {QUERY}, {NORM}, in .*test_bad": with_tensors(
        norm=None, query=None
    ),
    f"directory: wanted no other tensors, got model.layers.2.*, in .*{WHOLE}": with_tensors(
        **{"model.layers.2.mlp.up_proj.weight": ONES}
    ),
    rf"{QUERY}: .*\(24, 16\) by config.json, got \(16, 24\) in .*{WHOLE}": with_tensors(query=ONES),
    f"{NORM}: .* float64 in .*{WHOLE}, got I8": with_tensors(norm=np.int8(ONES[:, 0])),
    f"{NORM}: wanted float32 as in .*, got float16": with_tensors(norm=np.float16(ONES[:, 0])),
    "num_hidden_layers: .*2 layers .* 1000000000": with_tensors(
        SAID | {"num_hidden_layers": 10**9}
    ),
    f"{WHOLE}: wanted a safetensors file, got .*not fully covered": with_file(
        WHOLE, lambda file: file.write_bytes(file.read_bytes()[:-5])
    ),
    f"{WHOLE}: wanted a safetensors file, got .*header too large": with_file(
        WHOLE,
        lambda file: file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:]),
    ),
    f"{WHOLE}: wanted a safetensors file, got": with_header(lambda header: b"[" * 100_000),
    f"{WHOLE}: .*invalid value: integer `-": with_header(lambda h: h[NORM].update(shape=[-4, -4])),
    f"{WHOLE}: .*invalid offset for tensor": with_header(lambda h: h[HEAD].update(h[EMBED])),
    "directory: .* inside .*, got str '../all.safetensors'": by_index("../all.safetensors"),
    "directory: wanted files inside .*, got str '/etc/passwd'": by_index("/etc/passwd"),
    "gone.safetensors: wanted a safetensors file, got .*No such file": by_index("gone.safetensors"),
    "directory: wanted no other tensors, got model.other, in .*b.saf": beside_the_index(
        "model.other", ONES
    ),
    f"{NORM}: wanted one tensor of this name, got two .*all.safeten.*b.safe": beside_the_index(
        NORM, ONES[:, 0]
    ),
    f"directory: wanted tensors of 2 layers, got {NORM}, in .*: {INDEX} is ignored": partial(1),
    f"num_hidden_layers: wanted at most the 1 layers .*: {INDEX} is ignored, as": partial(13),
    f"directory: wanted all .*, got none for .*: {INDEX} is ignored, as there is a {WHOLE}": partial(
        25
    ),
    f"directory: .* {EMBED}, got embed_tokens.weight.*: names in the file lack 'model.'": renamed(
        lambda name: name.removeprefix("model.")
    ),
    f"directory: .* {EMBED}, got base_model.model.model.em.*: .* begin with 'base_model.model.'": (
        renamed(lambda name: f"base_model.model.{name}")
    ),
    f"directory: wanted names such as .*{EMBED}, got language_model.model.em": renamed(
        lambda name: f"language_model.{name}"
    ),
    "model.other: wanted it in .*all.safetensors, as": by_index("all.safetensors", "model.other"),
    r"directory: wanted files inside .*, got str 'a.*x00b'": by_index("a\0b"),
    r"directory: wanted files inside .*, got str 'a{50,60}[.]{3}, which": by_index("a" * 5000),
    f"{INDEX}: wanted the weight_map of a checkpoint, got .*not strings": by_index(7),
    f"{INDEX}: wanted the weight_map of a checkpoint, got": by_index(None),
    f"{WHOLE}: wanted a safetensors file, got .*symbolic links": with_file(WHOLE, linked_to_itself),
    f"directory: wanted files inside .*, got str '{WHOLE}'": with_file(
        WHOLE, lambda file: file.symlink_to(file.rename(f"{file.parent}-away.safetensors"))
    ),
    f"{WHOLE}: wanted a file, got a folder, a pipe or a device": with_file(WHOLE, piped),
    "config.json: wanted a file, got a folder, a pipe": with_file("config.json", piped),
    "got pytorch_model.bin; write it as safetensors with save_pretrained": with_file(
        WHOLE, lambda file: file.rename(file.with_name("pytorch_model.bin"))
    ),
    f"directory: wanted {WHOLE} or {INDEX} in it, got": with_file(WHOLE, Path.unlink),
    "path: wanted a config.json, got .*config.json": with_file("config.json", Path.unlink),
    f"{WHOLE}: .*, got a Git LFS pointer: git lfs pull": with_file(WHOLE, pointer),
    "config.json: wanted the file itself, got a Git LFS": with_file("config.json", pointer),
    r"model-\w+-00001-of-\d+.safetensors: .* of the save \w+": of_another_save("model-*"),
    "config.json: wanted energy_attn_save .*, as in the weights": of_another_save("config*"),
}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_bad_folder(message, tmp_path, monkeypatch):
    """Each error names the tensor or the file, and comes before the first weight is read."""
    BAD_FOLDERS[message](tmp_path)

    def never(*_):
        raise AssertionError("a weight is read")

    monkeypatch.setattr("energy_attn.distributed.runtime._safetensors.read", never)
    with pytest.raises(ValueError, match=message):
        Llama.load(tmp_path)


def test_bad_arguments(tmp_path, unchecked):
    """Mistakes with arguments, named before any file is read or written."""
    model = Llama.load(write(tmp_path, arrays()))
    mesh = make_mesh((4, 2), ("sequence", "tensor"))
    wide = make_mesh((1, 8), ("sequence", "tensor"))
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    for wanted, call in {
        "ValueError directory: wanted a folder on this machine, got .*gone": lambda: Llama.load(
            tmp_path / "gone"
        ),
        "TypeError directory: wanted the path": lambda: Llama.load(7),
        "TypeError path: wanted the path": lambda: LlamaConfig.from_json(7),
        "TypeError directory: wanted the path.* None": lambda: model.save(None),
        "ValueError max_shard_size: wanted at least 1": lambda: model.save("", max_shard_size=0),
        "TypeError dtype: wanted": lambda: Llama.load(tmp_path, dtype="int8"),
        "TypeError mesh: wanted a jax.sharding.Mesh": lambda: Llama.load(tmp_path, mesh=8),
        "TypeError mesh: wanted a jax.sharding.Mesh.*tuple": lambda: shard(model, (4, 2)),
        "TypeError model: wanted a decoder or an encoder": lambda: shard(model.norm, mesh),
        "TypeError tensor: wanted the name": lambda: shard(model, mesh, tensor=1),
        "TypeError progress: wanted": lambda: Llama.load(tmp_path, progress="bar"),
        "ValueError mesh: .* 'tensor' that divides num_attention_heads 4, got 8 devices": lambda: (
            Llama.load(tmp_path, mesh=wide)
        ),
        "ValueError mesh: .* 'sequence' that divides num_key_value_heads 2, got 4": lambda: shard(
            model, mesh, tensor="sequence"
        ),
        "ValueError mesh: wanted an automatic axis 'tensor'": lambda: shard(model, explicit),
        "TypeError model.embed_tokens.weight: wanted a concrete array": lambda: (
            eqx.filter_eval_shape(Llama, CONFIG, key=jax.random.key(0)).save(tmp_path)
        ),
    }.items():
        with refused(wanted):
            call()
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", WHOLE}


def test_what_is_written(tmp_path):
    """By safetensors' own reader; other files stay, and those of an older checkpoint are removed."""
    mesh = make_mesh((4, 2), ("sequence", "tensor"))
    tensors = arrays(ml_dtypes.bfloat16)
    model = Llama.load(write(tmp_path, tensors), mesh=mesh)
    out = tmp_path / "new" / "folder"
    model.save(out, max_shard_size=1500)
    files = sorted(out.glob("*.safetensors"))
    index = json.loads((out / INDEX).read_text())
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    found = {}
    for file in files:
        here = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in here)
        assert sum(x.nbytes for x in here.values()) <= 1500
        found |= here
    assert found.keys() == tensors.keys()
    for name, x in found.items():
        np.testing.assert_array_equal(x, tensors[name], err_msg=name)
    (out / "tokenizer.json").write_text("{}")
    model.save(out)
    assert {file.name for file in out.iterdir()} == {"config.json", WHOLE, "tokenizer.json"}
    with safe_open(out / WHOLE, "np") as file:
        about = file.metadata()
    said = json.loads((out / "config.json").read_text())
    assert about == {"format": "pt", "energy_attn_save": said["energy_attn_save"]}
    assert said["torch_dtype"] == "bfloat16" and said["eos_token_id"] == [3, 5]
    assert_same(Llama.load(out), tensors)


TINY = LlamaConfig(6, 2, 2, num_hidden_layers=1, num_attention_heads=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def saves():
    """A model that is there, and the one that is saved in its place."""
    other = dataclasses.replace(TINY, rope_theta=9.0)
    return build(TINY, jnp.float32), build(other, jnp.float32, seed=2)


def equal(model, other):
    leaves = zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True)
    return model.config == other.config and all(np.array_equal(a, b) for a, b in leaves)


@pytest.mark.parametrize(
    ("sizes", "error"),
    few_rows(
        [((9999, 99), OSError), ((99, 9999), Killed), ((99, 99), Killed), ((9999, 99), Killed)], 2
    ),
)
def test_a_save_that_ends_anywhere(sizes, error, saves, tmp_path):
    """Weights of one save beside weights or constants of another; files that no reader wants, for ever."""
    old, new = saves
    first, folder = tmp_path / "first", tmp_path / "folder"
    old.save(first, max_shard_size=sizes[0])
    made, seen = len(contents(first)), []
    assert made == (2 if sizes[0] > 99 else 4)
    for step in range(1, 200):
        shutil.copytree(first, folder)
        with failing(step, error) as disk:
            try:
                new.save(folder, max_shard_size=sizes[1])
                ended = True
            except (Killed, OSError):
                ended = False
        if not disk.failed:
            break
        found = Llama.load(folder)
        is_new = equal(found, new)
        assert is_new or (equal(found, old) and not ended)
        seen.append(is_new)
        if error is OSError and not is_new:
            assert contents(folder) == contents(first)
        with contextlib.suppress(Killed), failing(step):
            old.save(folder, max_shard_size=sizes[0])
        assert len(contents(folder)) <= 10
        with failing():
            new.save(folder, max_shard_size=sizes[1])
        assert len(contents(folder)) == (2 if sizes[1] > 99 else 4)
        shutil.rmtree(folder)
    assert ended and equal(Llama.load(folder), new) and {*seen} == {False, True}
    assert error is OSError or seen == sorted(seen)  # one step decides
    disk.check_synced()


@pytest.mark.parametrize(
    ("before", "after"), few_rows([(99, 99), (None, 9999), (9999, 9999), (9999, 99), (99, 9999)], 2)
)
def test_a_load_while_another_saves(before, after, saves, tmp_path):
    """Tensors of two saves in one model, or one's weights with the other's constants: no error says so."""
    old, new = saves
    first, folder = tmp_path / "first", tmp_path / "folder"
    old.save(first, max_shard_size=before or 9999)
    if before is None:  # as others write it, without the identity of a save
        save_file(load_file(first / WHOLE), first / WHOLE)
        said = json.loads((first / "config.json").read_text())
        del said["energy_attn_save"]
        (first / "config.json").write_text(json.dumps(said))
    seen = set()
    for at in range(1, 200):
        shutil.copytree(first, folder)
        with meanwhile(lambda: new.save(folder, max_shard_size=after), at) as other, failing():
            found = Llama.load(folder)
        assert equal(found, old) or equal(found, new)
        seen.add(equal(found, new))
        shutil.rmtree(folder)
        if not other.acted:
            break
    assert other.count > 10 and seen == {False, True}


def test_a_load_while_others_save_for_ever(saves, tmp_path, monkeypatch):
    """A load that never returns, or one of files that do not belong together."""
    old, new = saves
    old.save(tmp_path)
    monkeypatch.setattr("energy_attn.distributed.runtime._files._TRIES", 2)
    with meanwhile(lambda: new.save(tmp_path)), failing():
        with pytest.raises(ValueError, match=f"{tmp_path}: wanted files that stay .* 2 times"):
            Llama.load(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"), few_rows([(99, 99), (9999, 99), (99, 9999), (9999, 9999)], 1)
)
def test_two_saves_at_once(one, other, saves, tmp_path):
    """Each removes what the other has just written, and nothing is left that loads."""
    old, new = saves
    refused = []

    def save():
        try:
            new.save(folder, max_shard_size=other)
            refused.append(False)
        except OSError as error:
            assert f"{folder}: wanted no other save" in str(error)
            refused.append(True)

    for at in range(1, 200):
        folder = tmp_path / str(at)
        with failing():
            new.save(folder, max_shard_size=99)
            with meanwhile(save, at) as second:
                old.save(folder, max_shard_size=one)
        found = Llama.load(folder)
        assert equal(found, old) or (equal(found, new) and not refused[-1])
        assert len(contents(folder)) in (2, 4)
        if not second.acted:
            break
    assert sum(refused) > len(refused) / 2 and not refused[0]


def test_progress(tmp_path, capsys):
    """Silent without a terminal; a function is called for each weight, at last with a share of 1."""
    write(tmp_path, arrays())
    Llama.load(tmp_path)
    assert capsys.readouterr() == ("", "")
    told = []
    Llama.load(tmp_path, progress=lambda done, name: told.append((done, name)))
    assert {name for _, name in told} == set(arrays())
    shares = [done for done, _ in told]
    assert shares == sorted(set(shares)) and shares[-1] == 1
    Llama.load(tmp_path, progress=True)
    assert "100%" in capsys.readouterr().err


SPLIT = {
    "model.embed_tokens.weight": P("tensor"),
    "lm_head.weight": P("tensor"),
    "self_attn.q_proj.weight": P("tensor"),
    "self_attn.k_proj.bias": P("tensor"),
    "self_attn.o_proj.weight": P(None, "tensor"),
    "self_attn.o_proj.bias": P(),
    "mlp.gate_proj.weight": P("tensor"),
    "mlp.down_proj.weight": P(None, "tensor"),
    "input_layernorm.weight": P(),
    "model.norm.weight": P(),
}


def test_where_weights_lie(tmp_path, monkeypatch):
    """Each device has only its part; abstract weights, arrays and files agree."""
    # bytes: 3 rows of 16
    monkeypatch.setattr("energy_attn.distributed.runtime._safetensors._PIECE", 200)
    tensors = arrays()
    write(tmp_path, tensors)
    mesh = make_mesh((4, 2), ("sequence", "tensor"))
    read = leaves_of(Llama.load(tmp_path, mesh=mesh))
    moved = leaves_of(shard(Llama.load(tmp_path), mesh))
    model = eqx.filter_eval_shape(Llama, CONFIG, key=jax.random.key(0))
    abstract = leaves_of(shard(model, mesh))
    for name, want in tensors.items():
        spec = next((spec for end, spec in SPLIT.items() if name.endswith(end)), None)
        assert read[name].sharding == moved[name].sharding == abstract[name].sharding
        assert spec is None or read[name].sharding == NamedSharding(mesh, spec), name
        for leaf in (read[name], moved[name]):
            assert len(leaf.addressable_shards) == 8
            for part in leaf.addressable_shards:
                np.testing.assert_array_equal(part.data, want[part.index], err_msg=name)
    with jax.set_mesh(make_mesh((2, 4))):  # a mesh without an axis `tensor`
        here = leaves_of(Llama.load(tmp_path))
    assert all(leaf.sharding.is_fully_replicated for leaf in here.values())
    assert all(len(leaf.sharding.device_set) == 8 for leaf in here.values())
    odd = dataclasses.replace(CONFIG, vocab_size=25)
    odd = shard(eqx.filter_eval_shape(Llama, odd, key=jax.random.key(0)), mesh)
    assert odd.embed_tokens.weight.sharding.spec == odd.lm_head.weight.sharding.spec == P(None)


# The high-water mark of a process that reads a checkpoint onto a mesh, each weight on two devices of four; or that
# keeps no weight, as one that hands them to accelerators.
PEAK = """
import sys
import threading
from pathlib import Path
import jax
from energy_attn.distributed import make_mesh
from energy_attn.models import Llama
from energy_attn.models.checkpoint import _load

folder, hands_on = sys.argv[1], sys.argv[2] == "True"
mesh = make_mesh((2, 2), ("sequence", "tensor"))
Llama.load(folder + "/small", mesh=mesh)  # what JAX needs, whatever it reads
largest = 0

def handed_on(array):
    global largest
    largest = max(largest, array.nbytes)
    jax.block_until_ready(array)
    if hands_on:
        array.delete()
    return array

class Jax:
    block_until_ready = staticmethod(handed_on)

    def __getattr__(self, name):
        return getattr(jax, name)

def own():  # without the pages of files, which the system takes back when it needs them
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))

found, ended = [own()], threading.Event()

def watch():
    while not ended.wait(1e-4):
        found.append(own())

watching = threading.Thread(target=watch)
watching.start()
_load.jax = Jax()
model = Llama.load(folder, mesh=None if hands_on else mesh)
ended.set()
watching.join()
kept = [] if hands_on else jax.tree.leaves(model)
held = sum(s.data.nbytes for x in kept for s in x.addressable_shards) / 1024
print(max(found) - found[0] - held, largest / 1024)
"""


def hollow(folder, config, dtype, count=1):
    """A checkpoint of zeros that take no space on disk, in so many files; returns its weights, and the files' sizes."""
    (folder / "small").mkdir()
    write(folder / "small", arrays())
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    leaves = leaves_of(eqx.filter_eval_shape(Llama, config, key=jax.random.key(0)))
    headers, ends, where = [{} for _ in range(count)], [0] * count, {}
    for name, leaf in leaves.items():
        i = int(np.argmin(ends))
        begin, ends[i] = ends[i], ends[i] + {"F32": 4, "BF16": 2}[dtype] * leaf.size
        headers[i][name] = {"dtype": dtype, "shape": leaf.shape, "data_offsets": [begin, ends[i]]}
        where[name] = f"model-{i}.safetensors"
    for i, (header, end) in enumerate(zip(headers, ends, strict=True)):
        file = folder / f"model-{i}.safetensors"
        rewritten(file, header, b"")
        os.truncate(file, file.stat().st_size + end)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return leaves, ends


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_host_memory(tmp_path):
    """Beside the weights, at most 1.2 of the largest: never the file, and never two weights at once."""
    hollow(tmp_path, LlamaConfig(64, 1024, 16384, 1, 4), "F32")
    beside, largest = map(float, spawn("-c", PEAK, tmp_path, "False", devices=4).split())
    assert largest == 64 * 1024
    assert 0 < beside < 1.2 * largest


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_host_memory_of_eight_billion(tmp_path):
    """A folder of 16 GB in four files: the host holds one weight at a time, and here what it handed to a device."""
    leaves, ends = hollow(tmp_path, LlamaConfig(128256, 4096, 14336, 32, 32, 8), "BF16", 4)
    assert sum(x.size for x in leaves.values()) > 8e9
    beside, largest = map(float, spawn("-c", PEAK, tmp_path, "True", devices=4).split())
    assert largest == 128256 * 4096 * 2 / 1024
    assert 0 < beside < 2.2 * largest < 0.6 * max(ends) / 1024
