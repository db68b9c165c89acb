"""Citations of this library, and of the papers whose ideas a program uses."""

import importlib.metadata
from typing import NamedTuple


class _Paper(NamedTuple):
    """The fields of the BibTeX entry of a paper on arXiv."""

    key: str
    title: str
    authors: str
    arxiv: str


_PAPERS = {
    "tree": _Paper(
        "shyam2024tree",
        "Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU clusters",
        "Shyam, Vasudev and Pilault, Jonathan and Shepperd, Emily and Anthony, Quentin and "
        "Millidge, Beren",
        "2408.04093",
    ),
    "milakov": _Paper(
        "milakov2018online",
        "Online normalizer calculation for softmax",
        "Milakov, Maxim and Gimelshein, Natalia",
        "1805.02867",
    ),
    "flash": _Paper(
        "dao2023flashattention2",
        "{FlashAttention-2}: Faster Attention with Better Parallelism and Work Partitioning",
        "Dao, Tri",
        "2307.08691",
    ),
    "ring": _Paper(
        "liu2023ring",
        "Ring Attention with Blockwise Transformers for Near-Infinite Context",
        "Liu, Hao and Zaharia, Matei and Abbeel, Pieter",
        "2310.01889",
    ),
    "ulysses": _Paper(
        "jacobs2023ulysses",
        "{DeepSpeed Ulysses}: System Optimizations for Enabling Training of Extreme Long Sequence "
        "Transformer Models",
        "Jacobs, Sam Ade and Tanaka, Masahiro and Zhang, Chengming and Zhang, Minjia and "
        "Song, Shuaiwen Leon and Rajbhandari, Samyam and He, Yuxiong",
        "2309.14509",
    ),
    "hybrid": _Paper(
        "fang2024usp",
        "{USP}: A Unified Sequence Parallelism Approach for Long Context Generative {AI}",
        "Fang, Jiarui and Zhao, Shangchun",
        "2405.07719",
    ),
    "gather": _Paper(
        "grattafiori2024llama3",
        "The {Llama} 3 Herd of Models",
        "Grattafiori, Aaron and others",
        "2407.21783",
    ),
    "llama": _Paper(
        "touvron2023llama",
        "{LLaMA}: Open and Efficient Foundation Language Models",
        "Touvron, Hugo and others",
        "2302.13971",
    ),
    "speculative": _Paper(
        "leviathan2022speculative",
        "Fast Inference from Transformers via Speculative Decoding",
        "Leviathan, Yaniv and Kalman, Matan and Matias, Yossi",
        "2211.17192",
    ),
    "specinfer": _Paper(
        "miao2023specinfer",
        "{SpecInfer}: Accelerating Generative {LLM} Serving with Tree-based Speculative Inference "
        "and Token Verification",
        "Miao, Xupeng and Oliaro, Gabriele and Zhang, Zhihao and others",
        "2305.09781",
    ),
    "zloss": _Paper(
        "chowdhery2022palm",
        "{PaLM}: Scaling Language Modeling with Pathways",
        "Chowdhery, Aakanksha and others",
        "2204.02311",
    ),
    "entropy": _Paper(
        "zhai2023stabilizing",
        "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
        "Zhai, Shuangfei and Likhomanenko, Tatiana and Littwin, Etai and Busbridge, Dan and "
        "Ramapuram, Jason and Zhang, Yizhe and Gu, Jiatao and Susskind, Josh",
        "2303.06296",
    ),
    "sinks": _Paper(
        "xiao2023streaming",
        "Efficient Streaming Language Models with Attention Sinks",
        "Xiao, Guangxuan and Tian, Yuandong and Chen, Beidi and Han, Song and Lewis, Mike",
        "2309.17453",
    ),
    "entmax": _Paper(
        "peters2019sparse",
        "Sparse Sequence-to-Sequence Models",
        "Peters, Ben and Niculae, Vlad and Martins, Andr{\\'e} F. T.",
        "1905.05702",
    ),
    "ramsauer": _Paper(
        "ramsauer2020hopfield",
        "{Hopfield} Networks is All You Need",
        r"Ramsauer, Hubert and Sch{\"a}fl, Bernhard and Lehner, Johannes and Seidl, Philipp and "
        r"Widrich, Michael and Adler, Thomas and Gruber, Lukas and Holzleitner, Markus and "
        r"Pavlovi{\'c}, Milena and Sandve, Geir Kjetil and Greiff, Victor and Kreil, David and "
        r"Kopp, Michael and Klambauer, G{\"u}nter and Brandstetter, Johannes and Hochreiter, Sepp",
        "2008.02217",
    ),
    "hoover": _Paper(
        "hoover2023energy",
        "Energy Transformer",
        "Hoover, Benjamin and Liang, Yuchen and Pham, Bao and Panda, Rameswar and "
        "Strobelt, Hendrik and Chau, Duen Horng and Zaki, Mohammed J. and Krotov, Dmitry",
        "2302.07253",
    ),
}

# What this process has used so far. Calls inside jit count when they are traced.
_used = {"tree": _PAPERS["tree"]}


def cite(*names: str) -> None:
    """Records that the ideas of these papers are used.

    Raises `KeyError` for an unknown name.
    """
    for name in names:
        _used[name] = _PAPERS[name]


def citation() -> None:
    """Prints BibTeX entries for this library and for the papers that this process has used.

    The Tree Attention paper is always printed. The others follow once a function built on them
    has been called: a method of attention over a mesh, `Llama`, prefix trees, `retrieve`, the penalties,
    sinks, the flash kernels.

    Source: Tree Attention (arXiv 2408.04093).

    Examples:
        >>> import energy_attn as ea
        >>> ea.citation()  # doctest: +ELLIPSIS
        @software{energy_attn,
        ...
        @article{shyam2024tree,
        ...
    """
    version = importlib.metadata.version("energy_attn")
    entries = [
        _entry(
            "software",
            "energy_attn",
            title="energy_attn: attention as the gradient of a free energy",
            author="{The energy_attn authors}",
            version=version,
        )
    ]
    entries += [
        _entry(
            "article",
            paper.key,
            title=paper.title,
            author=paper.authors,
            journal=f"arXiv preprint arXiv:{paper.arxiv}",
            year=f"20{paper.arxiv[:2]}",
        )
        for name, paper in _PAPERS.items()
        if name in _used
    ]
    print("\n\n".join(entries))


def _entry(kind: str, key: str, **fields: str) -> str:
    lines = [f"  {name:<7} = {{{text}}}," for name, text in fields.items()]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])
