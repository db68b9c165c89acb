"""Citations of this library, and of the papers whose ideas a program uses."""

import importlib.metadata
import re

# Of each paper on arXiv its name here, its key in BibTeX and its number; its title; its authors.
_TABLE = r"""
tree shyam2024tree 2408.04093
    Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU clusters
    Shyam, Vasudev and Pilault, Jonathan and Shepperd, Emily and Anthony, Quentin and Millidge, Beren
milakov milakov2018online 1805.02867
    Online normalizer calculation for softmax
    Milakov, Maxim and Gimelshein, Natalia
flash dao2023flashattention2 2307.08691
    {FlashAttention-2}: Faster Attention with Better Parallelism and Work Partitioning
    Dao, Tri
ring liu2023ring 2310.01889
    Ring Attention with Blockwise Transformers for Near-Infinite Context
    Liu, Hao and Zaharia, Matei and Abbeel, Pieter
ulysses jacobs2023ulysses 2309.14509
    {DeepSpeed Ulysses}: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models
    Jacobs, Sam Ade and Tanaka, Masahiro and Zhang, Chengming and Zhang, Minjia and Song, Shuaiwen Leon and
    Rajbhandari, Samyam and He, Yuxiong
hybrid fang2024usp 2405.07719
    {USP}: A Unified Sequence Parallelism Approach for Long Context Generative {AI}
    Fang, Jiarui and Zhao, Shangchun
gather grattafiori2024llama3 2407.21783
    The {Llama} 3 Herd of Models
    Grattafiori, Aaron and others
llama touvron2023llama 2302.13971
    {LLaMA}: Open and Efficient Foundation Language Models
    Touvron, Hugo and others
speculative leviathan2022speculative 2211.17192
    Fast Inference from Transformers via Speculative Decoding
    Leviathan, Yaniv and Kalman, Matan and Matias, Yossi
specinfer miao2023specinfer 2305.09781
    {SpecInfer}: Accelerating Generative {LLM} Serving with Tree-based Speculative Inference and Token Verification
    Miao, Xupeng and Oliaro, Gabriele and Zhang, Zhihao and others
zloss chowdhery2022palm 2204.02311
    {PaLM}: Scaling Language Modeling with Pathways
    Chowdhery, Aakanksha and others
entropy zhai2023stabilizing 2303.06296
    Stabilizing Transformer Training by Preventing Attention Entropy Collapse
    Zhai, Shuangfei and Likhomanenko, Tatiana and Littwin, Etai and Busbridge, Dan and Ramapuram, Jason and Zhang,
    Yizhe and Gu, Jiatao and Susskind, Josh
sinks xiao2023streaming 2309.17453
    Efficient Streaming Language Models with Attention Sinks
    Xiao, Guangxuan and Tian, Yuandong and Chen, Beidi and Han, Song and Lewis, Mike
entmax peters2019sparse 1905.05702
    Sparse Sequence-to-Sequence Models
    Peters, Ben and Niculae, Vlad and Martins, Andr{\'e} F. T.
ramsauer ramsauer2020hopfield 2008.02217
    {Hopfield} Networks is All You Need
    Ramsauer, Hubert and Sch{\"a}fl, Bernhard and Lehner, Johannes and Seidl, Philipp and Widrich, Michael and
    Adler, Thomas and Gruber, Lukas and Holzleitner, Markus and Pavlovi{\'c}, Milena and Sandve, Geir Kjetil and
    Greiff, Victor and Kreil, David and Kopp, Michael and Klambauer, G{\"u}nter and Brandstetter, Johannes and
    Hochreiter, Sepp
hoover hoover2023energy 2302.07253
    Energy Transformer
    Hoover, Benjamin and Liang, Yuchen and Pham, Bao and Panda, Rameswar and Strobelt, Hendrik and Chau, Duen Horng
    and Zaki, Mohammed J. and Krotov, Dmitry
"""
_PAPERS = {
    name: {
        "key": key,
        "title": title,
        "author": " ".join(authors.split()),
        "journal": f"arXiv preprint arXiv:{number}",
        "year": f"20{number[:2]}",
    }
    for name, key, number, title, authors in re.findall(
        r"^(\S+) (\S+) (\S+)\n +(.+)\n((?: +.+\n)+)", _TABLE, re.MULTILINE
    )
}

# What this process has used so far. Calls inside jit count when they are traced.
_used = {"tree": _PAPERS["tree"]}


def cite(*names: str) -> None:
    """Records that the ideas of these papers are used."""
    for name in names:
        _used[name] = _PAPERS[name]


def citation() -> None:
    """Prints BibTeX entries for this library and for the papers that this process has used.

    The Tree Attention paper is always printed, others once a function built on them has been called: a method of
    attention over a mesh, `Llama`, prefix trees, `retrieve`, the penalties, sinks, the flash kernels.

    Source: Tree Attention (arXiv 2408.04093).

    Examples:
        >>> import energy_attn as ea
        >>> ea.citation()  # doctest: +ELLIPSIS
        @software{energy_attn,
        ...
        @article{shyam2024tree,
        ...
    """
    ours = {
        "key": "energy_attn",
        "title": "energy_attn: attention as the gradient of a free energy",
        "author": "{The energy_attn authors}",
        "version": importlib.metadata.version("energy_attn"),
    }
    papers = (_entry("article", **paper) for name, paper in _PAPERS.items() if name in _used)
    print("\n\n".join([_entry("software", **ours), *papers]))


def _entry(kind: str, key: str, **fields: str) -> str:
    lines = [f"  {name:<7} = {{{text}}}," for name, text in fields.items()]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])
