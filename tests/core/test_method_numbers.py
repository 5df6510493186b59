from perfed.core.method_numbers import OTHERS, USUAL, method_numbers


def test_a_usual_method_has_one_number_whatever_is_beside_it() -> None:
    for others in ([], ["fedmd"], ["fedmd", "comet", "ds-fl"], list(reversed(USUAL))):
        numbers = method_numbers([*others, "perfed-ckt (c=3, λ=1)", "local"])
        assert numbers["local"] == USUAL.index("local")
        assert len(set(numbers.values())) == len(numbers)
    assert method_numbers(["perfed-kin"]) == {"perfed-kin": USUAL.index("perfed-kin")}
    assert method_numbers(["fedavg(averaging=by-size)"]) == {
        "fedavg(averaging=by-size)": USUAL.index("fedavg")
    }


def test_of_variants_the_first_has_the_usual_number() -> None:
    numbers = method_numbers(["perfed-ckt (c=1)", "perfed-ckt (c=3)", "perfed-ckt (c=1)"])
    assert numbers == {"perfed-ckt (c=1)": USUAL.index("perfed-ckt"), "perfed-ckt (c=3)": 5}


def test_many_methods_have_as_many_numbers_and_the_first_all_colours() -> None:
    names = [f"method-{n}" for n in range(30)]
    assert sorted(method_numbers(names).values()) == list(range(30))
    assert [*method_numbers(names).values()][: len(OTHERS)] == list(OTHERS)
    assert sorted(OTHERS) == list(range(len(USUAL)))
