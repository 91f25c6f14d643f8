"""How PyTorch's own tests are shared out and told of; what they say is `make upstream`."""

from tests.upstream.sharing import chosen, lines_of

NAMES = [f"TestOne.test_{at}" for at in range(7)] + [f"TestTwo.test_mask_vs_math_{at}" for at in range(20)]


def test_shares_are_all_of_it_and_every_third_of_many_alike():
    shares = [chosen(NAMES, share, 4, 3) for share in range(4)]
    together = sorted(name for share in shares for name in share)
    assert together == sorted(NAMES[:7] + NAMES[7::3])


def test_a_test_that_ended_its_process_is_the_last_that_began(tmp_path):
    path = tmp_path / "ours-0.tsv"
    assert lines_of(path) == {}
    path.write_text("A.one\tbegun\t\nA.one\tpassed\t\nA.two\tbegun\t\n", encoding="utf-8")
    assert lines_of(path) == {"A.one": ("passed", ""), "A.two": ("begun", "")}
