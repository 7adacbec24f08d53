"""Synthetic protein families, with a computable floor of every loss on their sequences.

A family is an ancestor, amino acids drawn by their frequencies in proteins; a power of its rank says how common it is.
A sequence is its ancestor with some amino acids exchanged, independently, as BLOSUM62 finds them among relatives. All
sequences are equally long. So the probability of a sequence is a mixture over families that is summed exactly, and
that of an amino acid in a known family, whatever stands around it, bounds every prediction.
"""

import dataclasses
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from impl.data.synthetic import inverse_cdf, row_entropy, uniforms
from impl.data.tokenizer import AminoTokenizer
from impl.data.tokens import SPLITS, Entropy, Manifest
from impl.data.writing import new_token_folder
from impl.fields import CHECKED
from impl.seeding import derive

COMMONNESS = 1.5
"""Families are as common as their rank to the power of minus this."""
KINDS = 20
"""Standard amino acids, the first ones of `AMINO_ACIDS`; the others are not drawn."""
FREQUENCIES = (
    78.05, 19.25, 53.64, 62.95, 38.56, 73.77, 21.99, 51.42, 57.44, 90.19, 22.43, 44.87, 52.03, 42.64,
    51.29, 71.2, 58.41, 64.41, 13.3, 32.16,
)  # fmt: skip
"""Of each amino acid, times 1000 (Robinson and Robinson 1991, as in NCBI BLAST: `Robinson_prob` of blast_stat.c)."""
BLOSUM62 = """
4
0 9
-2 -3 6
-1 -4 2 5
-2 -2 -3 -3 6
0 -3 -1 -2 -3 6
-2 -3 -1 0 -1 -2 8
-1 -1 -3 -3 0 -4 -3 4
-1 -3 -1 1 -3 -2 -1 -3 5
-1 -1 -4 -3 0 -4 -3 2 -2 4
-1 -1 -3 -2 0 -3 -2 1 -1 2 5
-2 -3 1 0 -3 0 1 -3 0 -3 -2 6
-1 -3 -1 -1 -4 -2 -2 -3 -1 -3 -2 -2 7
-1 -3 0 2 -3 -2 0 -3 1 -2 0 0 -1 5
-1 -3 -2 0 -3 -2 0 -3 2 -2 -1 0 -2 1 5
1 -1 0 0 -2 0 -1 -2 0 -2 -1 1 -1 0 -1 4
0 -1 -1 -1 -2 -2 -2 -1 -1 -1 -1 0 -1 -1 -1 1 5
0 -1 -3 -2 -1 -3 -3 3 -2 1 1 -3 -2 -2 -3 -2 0 4
-3 -2 -4 -3 1 -2 -2 -3 -3 -2 -1 -4 -4 -2 -3 -3 -2 -3 11
-2 -2 -3 -2 3 -3 2 -1 -2 -1 -1 -2 -3 -1 -2 -2 -2 -1 2 7
"""
"""Half bits by which relatives have two amino acids in one place more often than chance: the triangle of the symmetric
matrix (Henikoff and Henikoff 1992, as Biopython has it: Bio/Align/substitution_matrices/data/BLOSUM62)."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ProteinConfig:
    """Parameters of protein families and the numbers of their sequences."""

    seed: int = 0
    families: int = Field(default=512, ge=1, le=2**16)
    length: int = Field(default=24, ge=1, le=2**12)
    """Amino acids of every sequence."""
    exchanged: float = Field(default=0.1, gt=0, le=1)
    """Share of them that BLOSUM62 exchanges, often for themselves."""
    train_sequences: int = Field(default=400_000, ge=1)
    valid_sequences: int = Field(default=4_000, ge=2)


@plain_dataclass(frozen=True)
class Families:
    """Families of relatives. Shapes: ancestors [families, length], shares [families], copies [20, 20]."""

    ancestors: np.ndarray
    shares: np.ndarray
    """Probability of each family."""
    copies: np.ndarray
    """Probability of each amino acid in a sequence (columns) where its ancestor has one (rows)."""

    @cached_property
    def nats_of_known(self) -> float:
        """Nats of an amino acid whose ancestor is known: no prediction of any kind is better on average."""
        return float(self.shares @ row_entropy(self.copies)[self.ancestors].mean(axis=1))

    @property
    def nats_per_token(self) -> float:
        """Nats of a token, at least: `nats_of_known` spread over all tokens, as the end of a sequence takes none."""
        length = self.ancestors.shape[1]
        return self.nats_of_known * length / (length + 1)

    def sample(self, seed: int, count: int) -> np.ndarray:
        """Return sequences as ids of amino acids. Shapes: uint8 [count, length]."""
        chosen = inverse_cdf(self.shares, uniforms(derive(seed, "family"), count))
        found = self.ancestors[chosen]
        draw = uniforms(derive(seed, "copy"), found.size).reshape(found.shape)
        made = np.empty(found.shape, np.uint8)
        for kind, row in enumerate(self.copies):
            made[found == kind] = inverse_cdf(row, draw[found == kind])
        return made

    def nats(self, sequences: np.ndarray) -> np.ndarray:
        """Return each sequence's code length: of its probability over all families. Shapes: [n, length] -> [n]."""
        logs = np.log(self.copies)
        of_family = np.log(self.shares)[:, None] + sum(
            logs[here][:, ours] for here, ours in zip(self.ancestors.T, sequences.T, strict=True)
        )
        return -np.logaddexp.reduce(of_family, axis=0)


def make_families(config: ProteinConfig) -> Families:
    """Return the families of a configuration; its seed fixes the ancestors."""
    background = np.array(FREQUENCIES) / sum(FREQUENCIES)
    scores = np.zeros((KINDS, KINDS))
    scores[np.tril_indices(KINDS)] = [int(score) for score in BLOSUM62.split()]
    odds = 2.0 ** ((scores + np.tril(scores, -1).T) / 2)
    exchanges = odds * background / (odds @ background)[:, None]
    draw = uniforms(derive(config.seed, "proteins", "ancestors"), config.families * config.length)
    common = np.arange(1, config.families + 1) ** -COMMONNESS
    return Families(
        ancestors=inverse_cdf(background, draw).reshape(config.families, config.length),
        shares=common / common.sum(),
        copies=(1 - config.exchanged) * np.eye(KINDS) + config.exchanged * exchanges,
    )


def write_proteins(folder: Path, config: ProteinConfig) -> Manifest:
    """Write a token folder of sequences, with their entropy in the manifest.

    Raises:
        InputError: `folder` holds something else.
        OSError: it cannot be written.
    """
    families, nats = make_families(config), np.zeros(0)
    with new_token_folder(folder, AminoTokenizer()) as writer:
        for name, count in zip(SPLITS, (config.train_sequences, config.valid_sequences), strict=True):
            found = families.sample(derive(config.seed, "proteins", name), count)
            ends = np.full((count, 1), AminoTokenizer.eot, np.uint8)
            writer.splits[name].add_tokens(np.hstack([found, ends]).ravel())
            for _ in range(count):
                writer.splits[name].count_document(bytes=config.length, words=1)
            nats = families.nats(found) if name == "valid" else nats
        known, tokens = families.nats_of_known, config.length + 1
        floors = Entropy(
            language=dataclasses.asdict(config),
            nats_per_token=families.nats_per_token,
            nats_per_word=known * config.length,
            nats_per_byte=known,
            valid_nats_per_token=nats.mean() / tokens,
            valid_standard_error=nats.std(ddof=1) / len(nats) ** 0.5 / tokens,
        )
        return writer.finish("synthetic", entropy=floors)
