"""Memory that is kept between passes: what is measured next must not show."""

from concurrent.futures import ThreadPoolExecutor

import torch

import attnscale
from attnscale.measure.cpu import room
from attnscale.measure.cpu.room import room_for

LIKE = torch.empty(0)


def test_statistics_stay_as_they_were_when_others_are_taken():
    query, key = torch.randn(2, 3, 41, 7), torch.randn(2, 3, 53, 7)
    read, unread = (attnscale.score_stats(query, key) for _ in range(2))
    expected = read.to_dict()
    attnscale.score_stats(100 * torch.randn(2, 3, 61, 7), torch.randn(2, 3, 67, 7))
    assert unread.to_dict() == expected


def test_each_thread_has_its_own():
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(room_for, 5, LIKE).result()
    assert other.data_ptr() != room_for(5, LIKE).data_ptr()


def test_what_was_made_in_inference_mode_is_used_outside_it():
    with ThreadPoolExecutor(1) as pool, torch.inference_mode():
        made = pool.submit(_made_in_inference_mode).result()
    made.add_(1.0)
    assert not made.is_inference()


def _made_in_inference_mode():
    with torch.inference_mode():
        return room_for(5, LIKE)


def test_a_default_device_is_none_of_its_business():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_made_elsewhere).result().device.type == "cpu"


def _made_elsewhere():
    with torch.device("meta"):
        return room_for(5, LIKE)


def test_no_more_is_kept_than_is_said():
    large = room_for(room.MOST + 1, LIKE)
    assert len(large) == room.MOST + 1
    assert room_for(3, LIKE).untyped_storage().nbytes() <= 4 * room.MOST
