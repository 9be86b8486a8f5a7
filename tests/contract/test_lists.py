"""Sorted and filtered lists of boxes (§26), reads that leave no trace (§25), and the history (§31)."""


def make(api, prefix, counts):
    for name, count in counts.items():
        records = [{"data": n} for n in range(count)]
        assert api.send("POST", f"/v0/boxes/{prefix}.{name}", {"records": records}).status_code == 201


def listed(api, **params):
    response = api.send("GET", "/v0/boxes", params=params)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_sorted_list_has_the_largest_first_and_says_how_many_there_are(api, box):
    """§26"""
    make(api, box, {"a": 2, "b": 5, "c": 1, "d": 3})
    page = listed(api, prefix=box + ".", sort="count", page_size=2)
    assert [each["count"] for each in page["boxes"]] == [5, 3] and page["total"] == 4
    rest = listed(api, prefix=box + ".", sort="count", page_size=2, cursor=page["next_cursor"])
    assert [each["count"] for each in rest["boxes"]] == [2, 1]
    assert "next_cursor" not in rest and "restarted" not in rest
    turned = listed(api, prefix=box + ".", sort="count", order="asc")
    assert [each["count"] for each in turned["boxes"]] == [1, 2, 3, 5]
    by_name = listed(api, prefix=box + ".", order="desc")
    assert [each["box"][-1] for each in by_name["boxes"]] == ["d", "c", "b", "a"]


def test_a_list_is_filtered_by_kind_class_and_part_of_the_name(api, box):
    """§26"""
    make(api, box, {"orders": 1, "orders.eu": 1})
    api.send("PUT", f"/v0/boxes/{box}.jobs", {"type": "queue", "durability": "memory"})
    page = listed(api, prefix=box, kind="queue")
    assert [each["box"] for each in page["boxes"]] == [f"{box}.jobs"] and page["total"] == 1
    assert page["boxes"][0]["queue"] == {
        "ready": 0,
        "in_flight": 0,
        "delayed": 0,
        "dead_lettered": 0,
        "outputs_pending": 0,
    }
    assert listed(api, prefix=box, q="orders")["total"] == 2
    assert listed(api, prefix=box, q="ORDERS")["total"] == 0
    assert listed(api, prefix=box, durability="memory")["total"] == 1
    assert listed(api, prefix=box)["total"] == 3


def test_the_lag_of_a_box_is_that_of_its_slowest_group(api, box):
    """§26"""
    make(api, box, {"log": 5, "other": 2})
    assert api.send("PUT", f"/v0/boxes/{box}.log/groups/slow", {"cursor": 1}).status_code == 201
    first = listed(api, prefix=box, sort="lag")["boxes"][0]
    assert (first["box"], first["lag"]) == (f"{box}.log", 4) and first["last_write_ts"] > 0


def test_an_ordering_that_is_gone_starts_again_and_says_so(api, box):
    """§26"""
    make(api, box, {"a": 1, "b": 2, "c": 3})
    page = listed(api, prefix=box + ".", sort="count", page_size=1)
    other = listed(api, prefix=box + ".", sort="bytes", page_size=1, cursor=page["next_cursor"])
    assert other["restarted"] is True and other["boxes"][0]["count"] == 3


def test_lists_refuse_what_they_do_not_know(api):
    """§26"""
    for params, field in (
        ({"sort": "colour"}, "sort"),
        ({"order": "up"}, "order"),
        ({"kind": "topic"}, "kind"),
        ({"durability": "paper"}, "durability"),
        ({"q": "x" * 257}, "q"),
        ({"sort": "count", "cursor": "AAAA"}, "cursor"),
        ({"cursor": "WyJhIixbMF1d"}, "cursor"),
    ):
        api.refused(api.send("GET", "/v0/boxes", params=params), 400, "invalid_request", field)


def test_reads_without_touch_do_not_count_as_reading(api, box):
    """§25"""
    make(api, box, {"log": 3})
    path = f"/v0/boxes/{box}.log"

    def last_read():
        return api.send("GET", path, params={"touch": "false"}).json()["last_read_ts"]

    assert api.send("POST", f"{path}/diff", {"touch": False}).json()["records"]
    assert api.send("POST", f"{path}/diff", {}, params={"touch": "false"}).status_code == 200
    assert last_read() is None
    assert api.send("POST", f"{path}/diff", {}).status_code == 200
    assert last_read() is not None


def test_the_history_has_a_value_a_second_and_refuses_unknown_series(api):
    """§31"""
    answer = api.send(
        "GET", "/v0/history", params={"series": "appends,shard_cpu.0,requests", "seconds": 5}
    ).json()
    assert answer["step_ms"] == 1000 and answer["series"].keys() == {"appends", "shard_cpu.0", "requests"}
    assert all(len(values) == 5 for values in answer["series"].values())
    everything = api.send("GET", "/v0/history").json()
    assert {len(values) for values in everything["series"].values()} == {900}
    assert {"ack_p99_ms", "fsync_p99_ms", "disk_free_bytes", "gateway_cpu"} <= everything["series"].keys()
    api.refused(api.send("GET", "/v0/history", params={"series": "x"}), 400, "invalid_request", "series")
    api.refused(api.send("GET", "/v0/history", params={"seconds": 901}), 400, "invalid_request", "seconds")
