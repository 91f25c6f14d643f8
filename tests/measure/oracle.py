"""ScoreStats from the full matrix, in NumPy float64."""

import numpy as np

from attnscale import reference

NAMES = (
    "mean",
    "variance",
    "std",
    "variance_within_rows",
    "std_within_rows",
    "max",
    "max_above_mean",
    "entropy",
    "entropy_ratio",
    "top1",
    "saturated",
    "jacobian_trace",
    "effective_keys",
    "sink",
)


def expected_stats(scores, sinks=None):
    """Return the statistics of scores (batch, heads, rows, keys), −∞ where hidden, by name, one value a head.

    `sinks`, (heads,): a learned logit of each head, that joins the denominator of every row.
    """
    shown = np.isfinite(scores)
    logits = scores
    if sinks is not None:
        own = np.broadcast_to(np.asarray(sinks)[:, None, None], (*scores.shape[:3], 1))
        logits = np.concatenate([scores, own], axis=-1)
    rows = reference.row_statistics(logits)
    seen = shown.any(-1)
    weights = reference.softmax(np.where(seen[..., None], logits, 0.0))
    first = np.take_along_axis(weights, shown.argmax(-1)[..., None], axis=-1)[..., 0]

    def per_head(values):
        flat = np.moveaxis(values, 1, 0).reshape(scores.shape[1], -1)
        return np.array([head[~np.isnan(head)].mean() if (~np.isnan(head)).any() else np.nan for head in flat])

    row_means = np.where(shown, scores, 0.0).sum(-1, keepdims=True) / np.maximum(shown.sum(-1, keepdims=True), 1)
    above = np.moveaxis(np.where(shown, scores - row_means, -np.inf), 1, 0).reshape(scores.shape[1], -1)
    within = np.where(np.isfinite(above), above, 0.0)
    counts = np.isfinite(above).sum(-1)
    variance_within_rows = (within**2).sum(-1) / np.where(counts > 0, counts, np.nan)
    moments = [reference.score_moments(scores[:, head]) for head in range(scores.shape[1])]
    of_rows = ("entropy", "entropy_ratio", "top1", "jacobian_trace", "effective_keys")
    found = {name: per_head(np.where(seen, getattr(rows, name), np.nan)) for name in of_rows}
    return found | {
        "sink": per_head(np.where(seen, first, np.nan)),
        "learned_sink": per_head(np.where(seen & (sinks is not None), weights[..., -1], np.nan)),
        "rows": seen.sum((0, 2)),
        "count": np.array([count for count, _, _ in moments]),
        "mean": np.array([mean for _, mean, _ in moments]),
        "variance": np.array([variance for _, _, variance in moments]),
        "std": np.sqrt([variance for _, _, variance in moments]),
        "variance_within_rows": variance_within_rows,
        "std_within_rows": np.sqrt(variance_within_rows),
        "max_above_mean": above.max(-1),
        "max": np.moveaxis(scores, 1, 0).reshape(scores.shape[1], -1).max(-1),
        "saturated": per_head(np.where(seen, rows.top1 > 0.99, np.nan)),
    }


def assert_stats(stats, scores, rtol=2e-5, atol=2e-6, sinks=None):
    """Assert that every statistic equals the one from the full matrix."""
    expected = expected_stats(scores, sinks)
    np.testing.assert_array_equal(stats.rows.cpu().numpy(), expected["rows"])
    np.testing.assert_array_equal(stats.count.cpu().numpy(), expected["count"])
    for name in (*NAMES, *(() if sinks is None else ["learned_sink"])):
        found = getattr(stats, name).cpu().numpy()
        np.testing.assert_allclose(found, expected[name], rtol=rtol, atol=atol, err_msg=name)


ROW_NAMES = ("max", "total", "gap", "participation", "mean", "deviation", "first")


def expected_rows(scores):
    """The sums of every row of scores (…, rows, keys), −∞ where hidden, by the names of RowSums."""
    rows = reference.row_statistics(scores)
    total = 1 / rows.top1
    seen = np.isfinite(scores)
    mean = np.where(seen, scores, 0.0).sum(-1) / seen.sum(-1)
    deviation = np.where(seen, scores - mean[..., None], 0.0)
    return {
        "max": rows.max,
        "total": total,
        "gap": rows.entropy - np.log(total),
        "participation": rows.participation,
        "mean": mean,
        "deviation": (deviation**2).sum(-1),
        "first": np.take_along_axis(scores, seen.argmax(-1)[..., None], -1)[..., 0] - rows.max,
    }


def assert_rows(found, wanted, tolerance):
    """The first four of RowSums, or all, relative to the wanted value where that is above one."""
    for name, tensor in zip(ROW_NAMES[: len(found)], found, strict=True):
        assert tensor.shape == wanted[name].shape
        error = np.abs(tensor.detach().double().cpu().numpy() - wanted[name]) / np.maximum(1.0, np.abs(wanted[name]))
        assert error.max(initial=0.0) <= tolerance, f"{name}: {error.max():.3g}"
