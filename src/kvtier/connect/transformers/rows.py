"""The arithmetic of a padded batch: which tokens each row has, and how far all rows can resume together.

A batch is padded on the left, so that all rows end at the same column. Row `i` has `pad_i` columns of padding, and its
token `t` is in column `pad_i + t`. The engine's cache has one length for all rows, counted in columns: when it resumes
at column `C`, row `i` needs the KV of its first `C - pad_i` tokens, and its padding columns hold filler that the
attention mask hides.
"""

from collections.abc import Collection, Sequence

import torch

from kvtier.connect.transformers.upstream import integers


def left_padding(mask: torch.Tensor) -> tuple[int, ...] | None:
    """Columns of padding before each row.

    Args:
        mask: [rows, columns]; zero hides a column.

    Returns:
        One count a row, or None when some row is padded elsewhere than on the left, has a hole, or has no token.
    """
    shown = mask != 0
    columns = shown.shape[1]
    padding = columns - shown.sum(dim=1)
    expected = torch.arange(columns, device=mask.device)[None, :] >= padding[:, None]
    if not bool((shown == expected).all()) or bool((padding >= columns).any()):
        return None
    return tuple(integers(padding))


def common_column(padding: Sequence[int], restorable: Sequence[int], columns: int) -> int:
    """The column at which all rows can resume, given how many leading tokens of each row can be restored.

    At least the last column is left to compute: its logits choose the first new token. A row whose first token lies
    behind the common column restores nothing and costs the others nothing.
    """
    reach = min(pad + tokens for pad, tokens in zip(padding, restorable, strict=True))
    return max(0, min(reach, columns - 1))


def row_tokens(column: int, pad: int) -> int:
    """How many leading tokens of a row lie before `column`."""
    return max(0, column - pad)


def row_end(sequence: Sequence[int], prompt_tokens: int, end_tokens: Collection[int]) -> int:
    """Where a row ends: after its first generated end token, or with the sequence.

    After an end token the engine feeds padding until the whole batch is done; that belongs to nobody.

    Args:
        sequence: the row's tokens without its left padding: prompt, then generated.
        prompt_tokens: how many of them are the prompt.
        end_tokens: tokens that end a row.
    """
    for position in range(prompt_tokens, len(sequence)):
        if sequence[position] in end_tokens:
            return position + 1
    return len(sequence)


def kept_tokens(sequence: Sequence[int], end: int) -> int:
    """How many leading tokens of a row that ends at `end` have KV: the sequence's last was chosen, but never read."""
    return min(end, len(sequence) - 1)
