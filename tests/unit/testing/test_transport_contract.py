"""The transport contract finds transports that break it."""

from pathlib import Path

import pytest
from tests.unit.testing.finding import finds, passes

from tpserve.testing import lab, processes

INSIDE = Path(__file__).with_name("faulty_transports.py")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Losing", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Doubling", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Fraying", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Fraying", "test_a_pipe_keeps_the_order_of_each_sender[ipc]"),
        ("FrayingTogether", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Miscounting", "test_many_small_frames_arrive_once_and_in_order"),
        ("MiscountingToo", "test_many_small_frames_arrive_once_and_in_order"),
        ("Wraparound", "test_a_long_run_of_frames_arrives_once_and_in_order"),
        ("NarrowAmongFour", "test_a_follower_that_closes_is_an_error_at_the_leader[2]"),
        ("Deaf", "test_closing_wakes_a_follower_that_waits"),
        ("Bare", "test_closing_wakes_a_leader_that_waits"),
        ("Bare", "test_closing_wakes_a_sender_that_waits"),
        ("Lingering", "test_closing_wakes_a_leader_that_waits"),
        ("Lingering", "test_closing_wakes_a_sender_that_waits"),
        ("Lingering", "test_a_leader_closes_once_all_is_taken"),
        ("Lingering", "test_a_pipe_sender_closes_once_all_is_taken"),
        ("Accepting", "test_closing_wakes_a_leader_that_waits"),
        ("Accepting", "test_closing_wakes_a_sender_that_waits"),
        ("Serving", "test_ends_of_a_fan_out_close_twice_and_are_then_closed[batches1]"),
        ("Serving", "test_ends_of_a_fan_out_close_twice_and_are_then_closed[batches2]"),
        ("Serving", "test_ends_of_a_pipe_close_twice_and_are_then_closed[3]"),
        ("UnaskingToSend", "test_ends_of_a_fan_out_close_twice_and_are_then_closed[batches0]"),
        ("Unasking", "test_ends_of_a_fan_out_close_twice_and_are_then_closed[batches0]"),
        ("Unasking", "test_ends_of_a_pipe_close_twice_and_are_then_closed[0]"),
        ("Fragile", "test_ends_of_a_fan_out_close_twice_and_are_then_closed[batches0]"),
        ("Fragile", "test_ends_of_a_pipe_close_twice_and_are_then_closed[0]"),
        ("RejoiningToLead", "test_closed_ends_join_no_fan_out"),
        ("Rejoining", "test_closed_ends_join_no_fan_out"),
        ("Rejoining", "test_a_closed_sender_joins_no_pipe"),
        ("Littering", "test_closing_leaves_no_file_and_no_descriptor"),
        ("Outliving", "test_a_leader_that_closes_again_leaves_the_next_one_alone[ipc]"),
        ("Outliving", "test_a_receiver_that_closes_again_leaves_the_next_one_alone[ipc]"),
        ("Narrow", "test_a_follower_that_closes_is_an_error_though_another_stands_still[1]"),
        ("Relaying", "test_a_leader_that_closes_is_an_error_though_one_stands_still[0]"),
        ("Swapping", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Cutting", "test_a_frame_of_64_mb"),
        ("Forgetting", "test_a_sender_far_ahead_waits_until_its_deadline"),
        ("Forgetting", "test_a_sender_goes_on_as_soon_as_it_is_read"),
        ("Hasty", "test_cold_starts"),
        ("Turning", "test_a_frame_of_64_mb"),
        ("Turning", "test_a_frame_of_64_mb_by_a_pipe"),
        ("Keeping", "test_a_sender_goes_on_as_soon_as_it_is_read"),
        ("Keeping", "test_a_pipe_sender_far_ahead_waits_and_may_try_again"),
        ("Polling", "test_a_waiting_follower_rests"),
        ("Napping", "test_a_waiting_follower_rests"),
        ("PollingToSend", "test_a_sender_goes_on_as_soon_as_it_is_read"),
        ("PollingToSend", "test_a_pipe_sender_far_ahead_waits_and_may_try_again"),
        ("PollingToSend", "test_a_missing_follower_is_an_error_at_the_leader"),
        ("PollingToSend", "test_a_missing_receiver_is_an_error"),
        ("PollingToJoin", "test_a_missing_leader_is_an_error_at_the_follower"),
        ("Forgetful", "test_a_deadline_loses_no_frame"),
        ("Careless", "test_a_pipe_sender_far_ahead_waits_and_may_try_again"),
        ("Sleepy", "test_closing_wakes_a_waiting_receiver"),
        ("LateLeader", "test_a_missing_follower_is_an_error_at_the_leader"),
        ("LateLeader", "test_a_sender_far_ahead_waits_until_its_deadline"),
        ("LateFollower", "test_a_missing_leader_is_an_error_at_the_follower"),
        ("LateFollower", "test_a_deadline_loses_no_frame"),
        ("LatePipe", "test_a_missing_receiver_is_an_error"),
        ("LatePipe", "test_a_pipe_takes_what_is_there_and_no_more"),
        ("LatePipe", "test_a_pipe_sender_far_ahead_waits_and_may_try_again"),
        ("Lending", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Lending", "test_a_pipe_keeps_the_order_of_each_sender[ipc]"),
        ("Eager", "test_an_empty_batch_sends_nothing"),
        ("Usurping", "test_an_address_that_a_leader_has_is_an_error[ipc]"),
        ("Usurping", "test_an_address_that_a_receiver_has_is_an_error[ipc]"),
        ("Hasting", "test_one_of_two_leaders_that_come_at_once_has_the_address[ipc]"),
        ("Hasting", "test_one_of_two_receivers_that_come_at_once_has_the_address[ipc]"),
        ("SeldomLosing", "test_many_small_frames_arrive_once_and_in_order"),
        ("SeldomLosing", "test_many_small_frames_arrive_by_a_pipe"),
        ("Hospitable", "test_a_second_of_the_same_number_that_comes_late_is_refused"),
        ("Touchy", "test_a_second_of_the_same_number_that_comes_late_is_refused"),
        ("Undying", "test_a_closed_transport_makes_no_ends"),
        ("Trampling", "test_somebody_elses_file_at_an_address_stays"),
        ("Wrapping", "test_each_follower_is_one_of_them"),
        ("Sharing", "test_two_of_the_same_number_are_not_two_followers"),
        ("Unparsing", "test_a_malformed_address_is_an_error[ipc://relative]"),
        ("Hiding", "test_what_it_does_not_offer_is_refused"),
        ("Hiding", "test_the_capabilities_do_not_contradict_each_other"),
        ("Boastful", "test_the_capabilities_do_not_contradict_each_other"),
    ],
)
def test_a_broken_promise_is_found(fault, test):
    assert finds(INSIDE, fault, test, 2.0, lab, processes)


def test_a_name_left_in_shared_memory_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "SHARED_MEMORY", tmp_path)
    assert finds(INSIDE, "Naming", "test_closing_leaves_no_file_and_no_descriptor", 2.0, lab, processes)


@pytest.mark.parametrize(
    "test",
    [
        "test_a_waiting_follower_rests",
        "test_closing_leaves_no_file_and_no_descriptor",
        "test_what_it_does_not_offer_is_refused",
        "test_the_capabilities_do_not_contradict_each_other",
    ],
)
def test_pipes_are_enough(test):
    assert passes(INSIDE, "PipesOnly", test)
