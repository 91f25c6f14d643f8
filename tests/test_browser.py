"""The guard of the page tests, held to catching what it is there for."""

import pytest


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<img src='http://127.0.0.1:9/pixel.png'>", "a request: http://127.0.0.1:9/pixel.png"),
        ("<script>console.error('lost')</script>", "lost"),
        ("<script>missing.name</script>", "missing is not defined"),
        ("<script>alert(1)</script>", "a dialog: 1"),
    ],
)
def test_requests_and_errors_of_a_page_are_detected(open_page, tmp_path, body, complaint):
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><link rel=icon href='data:,'>{body}", encoding="utf-8")
    open_page(path).wait_for_load_state("networkidle")
    assert complaint in open_page.complaints
    open_page.complaints.clear()
