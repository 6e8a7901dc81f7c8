use super::*;
use fastps_core::optim::{Adagrad, Optimizer, Sgd};
use std::collections::HashSet;

const LEASE: Duration = Duration::from_secs(30);

fn spec(name: &str, elements: u64) -> TensorSpec {
    TensorSpec::new(name, [elements], Optimizer::Sgd(Sgd::default()))
}

/// A map over `shards` shards of 1 GiB each.
fn map(shards: usize) -> Map {
    Map::new(shards, Meter::new(1 << 30), LEASE)
}

fn reserved(outcome: Registered) -> (u64, pb::Placement) {
    match outcome {
        Registered::Reserved { reservation, placement } => (reservation, placement),
        other => panic!("{other:?}"),
    }
}

#[test]
fn slices_go_where_the_load_is_least() {
    let (mut map, now) = (map(3), Instant::now());
    let (_, placement) = reserved(map.register(&spec("big", 3 * 258_048), 1, None, now).unwrap());
    assert_eq!(placement.shards, [0, 1, 2]);
    let (_, small) = reserved(map.register(&spec("a", 10), 1, None, now).unwrap());
    let (_, other) = reserved(map.register(&spec("b", 10), 1, None, now).unwrap());
    assert_eq!((small.shards, other.shards), (vec![0], vec![1]));
    let all: HashSet<_> = [&placement.slices, &small.slices, &other.slices].into_iter().flatten().collect();
    assert_eq!(all.len(), 5);
}

#[test]
fn a_registration_is_owned_waited_for_and_taken_over() {
    let (mut map, now) = (map(2), Instant::now());
    let w = spec("w", 10);
    let (first, placement) = reserved(map.register(&w, 1, None, now).unwrap());
    assert_eq!(reserved(map.register(&w, 1, None, now).unwrap()), (first, placement.clone()));
    assert!(matches!(map.register(&w, 2, None, now).unwrap(), Registered::UnderWay { .. }));
    assert!(map.page(&[], "", 0, &Scope::Everything).0.is_empty());
    let later = now + LEASE + Duration::from_secs(1);
    let (second, again) = reserved(map.register(&w, 2, None, later).unwrap());
    assert!(second != first && again.slices != placement.slices);
    assert_eq!(map.commit(first, 1).unwrap_err().kind, Kind::Lease);
    assert_eq!(map.commit(second, 1).unwrap_err().kind, Kind::Precondition);
    map.commit(second, 2).unwrap();
    map.commit(second, 2).unwrap();
    assert_eq!(map.register(&w, 3, None, later).unwrap(), Registered::Exists(again));
    assert_eq!(map.counts()[0], 1);
}

#[test]
fn hidden_characters_are_refused_in_new_names_only() {
    let (mut new, now, odd) = (map(1), Instant::now(), spec("a\u{1b}", 10));
    let error = new.register(&odd, 1, None, now).unwrap_err();
    assert_eq!((error.kind, error.got.as_deref()), (Kind::Config, Some("U+001B at character 2")));
    let there = Holding { spec: odd.clone(), group: 0, slices: vec![7], shards: vec![0] };
    let mut old = map(1).restore(BTreeMap::from([(5, there)]), Files::default()).unwrap();
    assert!(matches!(old.register(&odd, 1, None, now).unwrap(), Registered::Exists(_)));
}

#[test]
fn another_spec_is_refused_and_says_what_differs() {
    let (mut map, now) = (map(1), Instant::now());
    let (reservation, _) = reserved(map.register(&spec("w", 10), 1, None, now).unwrap());
    for committed in [false, true] {
        let shape = map.register(&spec("w", 11), 2, None, now).unwrap_err();
        assert_eq!(
            (shape.kind, shape.expected.as_deref()),
            (Kind::Precondition, Some("(10,)")),
            "{committed}"
        );
        let rule = Optimizer::Adagrad(Adagrad::default());
        let error = map.register(&TensorSpec { optimizer: rule, ..spec("w", 10) }, 2, None, now).unwrap_err();
        assert!(error.message.contains("optimizer"), "{error}");
        map.commit(reservation, 1).unwrap();
    }
}

#[test]
fn what_was_not_committed_in_time_ends_when_asked() {
    let (mut map, now) = (map(1), Instant::now());
    let (kept, _) = reserved(map.register(&spec("kept", 10), 1, None, now).unwrap());
    let (left, _) = reserved(map.register(&spec("left", 10), 1, None, now).unwrap());
    let all = [kept, left, 4711];
    map.commit(kept, 1).unwrap();
    let early = pb::SettleResponse { committed: vec![kept], ended: vec![4711], ..Default::default() };
    assert_eq!(map.settle(&all, false, now + LEASE), early);
    let late = pb::SettleResponse { committed: vec![kept], ended: vec![left, 4711], ..Default::default() };
    for _ in 0..2 {
        assert_eq!(map.settle(&all, false, now + 2 * LEASE), late);
    }
    assert_eq!(map.commit(left, 1).unwrap_err().kind, Kind::Lease);
    assert_eq!(map.counts()[..2], [1, 0]);
}

#[test]
fn abandoned_registrations_are_forgotten() {
    let (mut map, now) = (map(1), Instant::now());
    let (kept, _) = reserved(map.register(&spec("kept", 10), 1, None, now).unwrap());
    let (left, _) = reserved(map.register(&spec("left", 10), 1, None, now).unwrap());
    map.commit(kept, 1).unwrap();
    map.sweep(now + 2 * LEASE, |_| false);
    assert_eq!(map.counts()[..2], [1, 1]);
    map.sweep(now + 3 * LEASE, |_| false);
    assert_eq!(map.counts()[..2], [1, 0]);
    assert_eq!(map.commit(left, 1).unwrap_err().kind, Kind::Lease);
    map.unregister("kept", now, &Scope::Everything).unwrap();
    assert_eq!(map.counts()[..3], [0, 0, 0]);
}

#[test]
fn an_owner_may_give_up() {
    let (mut map, now) = (map(1), Instant::now());
    let (first, placement) = reserved(map.register(&spec("w", 10), 1, None, now).unwrap());
    let (second, other) = reserved(map.register(&spec("w", 11), 1, None, now).unwrap());
    assert!(first != second && placement != other);
    map.abandon(&placement.slices, &Scope::Everything);
    assert_eq!(map.counts()[1], 1);
    map.abandon(&other.slices, &Scope::Everything);
    assert_eq!(map.counts()[..3], [0, 0, 0]);
    reserved(map.register(&spec("w", 12), 2, None, now).unwrap());
}

#[test]
fn identifiers_never_recur_and_load_is_given_back() {
    let (mut map, now) = (map(1), Instant::now());
    let mut seen = HashSet::new();
    for _ in 0..3 {
        let (reservation, placement) = reserved(map.register(&spec("w", 10), 1, None, now).unwrap());
        assert!(seen.insert(reservation) && seen.insert(placement.slices[0]));
        assert_eq!(map.unregister("w", now, &Scope::Everything).unwrap_err().kind, Kind::UnknownTensor);
        map.commit(reservation, 1).unwrap();
        assert_eq!(map.unregister("w", now, &Scope::Everything).unwrap(), placement);
        assert_eq!(map.counts()[..3], [0, 0, 0]);
    }
}

#[test]
fn pages_follow_each_other() {
    let (mut map, now) = (map(1), Instant::now());
    for k in 0..25 {
        let (reservation, _) = reserved(map.register(&spec(&format!("w{k:02}"), 1), 1, None, now).unwrap());
        map.commit(reservation, 1).unwrap();
    }
    let (mut after, mut names) = (String::new(), Vec::new());
    loop {
        let (page, next) = map.page(&[], &after, 10, &Scope::Everything);
        names.extend(page.into_iter().filter_map(|e| e.spec).map(|s| s.name));
        if next.is_empty() {
            break;
        }
        after = next;
    }
    assert_eq!(names, (0..25).map(|k| format!("w{k:02}")).collect::<Vec<_>>());
    assert_eq!(map.page(&["w07".into(), "none".into()], "", 0, &Scope::Everything).0.len(), 1);
}

#[test]
fn a_page_within_a_namespace_begins_after_the_name_that_equals_its_prefix() {
    let (mut map, now) = (map(1), Instant::now());
    for name in ["run:a/", "run:a/v", "run:a/w"] {
        let spec = TensorSpec { group: "run:a/g".into(), ..spec(name, 1) };
        let (reservation, _) = reserved(map.register(&spec, 1, None, now).unwrap());
        map.commit(reservation, 1).unwrap();
    }
    let scope = "namespace:a".parse().unwrap();
    let (mut after, mut names) = (String::new(), Vec::new());
    for _ in 0..3 {
        let (page, next) = map.page(&[], &after, 1, &scope);
        names.extend(page.into_iter().filter_map(|e| e.spec).map(|s| s.name));
        after = next;
    }
    assert_eq!(names, ["run:a/", "run:a/v", "run:a/w"]);
    assert_eq!(after, "");
}

#[test]
fn a_look_up_touches_what_it_asks_for() {
    let touched = |tensors: usize| {
        let (mut map, now) = (map(1), Instant::now());
        for k in 0..tensors {
            let (reservation, _) =
                reserved(map.register(&spec(&format!("w{k:06}"), 1), 1, None, now).unwrap());
            map.commit(reservation, 1).unwrap();
        }
        let mut counts = Vec::new();
        let mut count = |map: &mut Map, work: &mut dyn FnMut(&mut Map)| {
            let before = map.counts()[3];
            work(map);
            counts.push(map.counts()[3] - before);
        };
        count(&mut map, &mut |map| {
            assert!(map.page(&["none".into()], "", 0, &Scope::Everything).0.is_empty());
        });
        count(&mut map, &mut |map| {
            let names = ["w000007".into(), "none".into(), "w000003".into()];
            assert_eq!(map.page(&names, "", 0, &Scope::Everything).0.len(), 2);
        });
        count(&mut map, &mut |map| {
            assert_eq!(
                map.unregister("none", now, &Scope::Everything).unwrap_err().kind,
                Kind::UnknownTensor
            );
        });
        count(&mut map, &mut |map| drop(map.unregister("w000007", now, &Scope::Everything).unwrap()));
        count(&mut map, &mut |map| map.abandon(&[1, 2], &Scope::Everything));
        counts
    };
    let few = touched(100);
    assert_eq!(few, [1, 3, 1, 1, 2]);
    assert_eq!(touched(20_000), few);
}

#[test]
fn names_that_are_asked_for_come_page_by_page() {
    let (mut map, now) = (map(1), Instant::now());
    for name in ["a", "b", "c"] {
        let (reservation, _) = reserved(map.register(&spec(name, 1), 1, None, now).unwrap());
        map.commit(reservation, 1).unwrap();
    }
    let names = ["c", "none", "a", "b", "a"].map(String::from);
    let (mut after, mut found) = (String::new(), Vec::new());
    loop {
        let (page, next) = map.page(&names, &after, 1, &Scope::Everything);
        found.extend(page.into_iter().filter_map(|entry| entry.spec).map(|spec| spec.name));
        if next.is_empty() {
            break;
        }
        after = next;
    }
    assert_eq!(found, ["a", "b", "c"]);
}

#[test]
fn what_the_map_has_is_charged() {
    let meter = Meter::new(64 << 20);
    let (mut map, now) = (Map::new(1 << 10, meter.clone(), LEASE), Instant::now());
    let mut refused = None;
    // 2^14 slices each.
    for client in 1..1000 {
        match map.register(&spec(&format!("w{client}"), 258_048 << 14), client, None, now) {
            Ok(_) => {}
            Err(error) => {
                refused = Some((client, error));
                break;
            }
        }
    }
    let (clients, error) = refused.unwrap();
    assert_eq!((error.kind, error.tensor.as_deref().is_some()), (Kind::Capacity, true));
    assert!(error.retry_after_ms.is_some() && clients > 16, "{clients}: {error}");
    assert!(meter.used_for(Purpose::Map) >= (clients - 1) * (12 << 14), "{clients}");
    map.sweep(now + 3 * LEASE, |_| false);
    assert_eq!(meter.used(), 0);
    // What exists takes less than what is under way.
    let (reservation, _) = reserved(map.register(&spec("w", 258_048 << 10), 1, None, now).unwrap());
    let pending = meter.used();
    map.commit(reservation, 1).unwrap();
    assert!(meter.used() < pending && meter.used() > 12 << 10);
    map.unregister("w", now, &Scope::Everything).unwrap();
    map.sweep(now, |_| false);
    assert_eq!(meter.used(), 0);
}

#[test]
fn what_could_never_be_held_is_refused_at_once() {
    let meter = Meter::new(64 << 20);
    let (mut map, now) = (Map::new(2, meter.clone(), LEASE), Instant::now());
    // Its values and its spare.
    reserved(map.register(&spec("fits", 15 << 20), 1, None, now).unwrap());
    let error = map.register(&spec("large", 17 << 20), 1, None, now).unwrap_err();
    assert_eq!((error.kind, error.tensor.as_deref()), (Kind::Capacity, Some("large")));
    assert!(error.retry_after_ms.is_none() && error.expected.is_some(), "{error}");
    assert_eq!(map.counts()[1], 1);
}

#[test]
fn a_client_has_few_registrations_under_way() {
    let (mut map, now) = (map(1), Instant::now());
    let all: Vec<_> = (0..MAX_OPEN_REGISTRATIONS)
        .map(|k| reserved(map.register(&spec(&format!("w{k}"), 1), 1, None, now).unwrap()))
        .collect();
    let error = map.register(&spec("more", 1), 1, None, now).unwrap_err();
    assert!(error.kind == Kind::Capacity && error.retry_after_ms.is_some(), "{error}");
    // A repeat is no further one, and others have theirs.
    reserved(map.register(&spec("w0", 1), 1, None, now).unwrap());
    reserved(map.register(&spec("more", 1), 2, None, now).unwrap());
    map.commit(all[0].0, 1).unwrap();
    reserved(map.register(&spec("more 1", 1), 1, None, now).unwrap());
    assert!(map.register(&spec("more 2", 1), 1, None, now).is_err());
    map.abandon(&all[1].1.slices, &Scope::Everything);
    reserved(map.register(&spec("more 2", 1), 1, None, now).unwrap());
    assert!(map.registers(1) && map.registers(2) && !map.registers(3));
}

#[test]
fn tensors_are_placed_together_or_not_at_all() {
    let (mut map, now) = (map(1), Instant::now());
    let there = reserved(map.register(&spec("there", 1), 1, None, now).unwrap());
    map.commit(there.0, 1).unwrap();
    let mine = reserved(map.register(&spec("mine", 1), 1, None, now).unwrap());
    reserved(map.register(&spec("theirs", 1), 2, None, now).unwrap());
    let before = map.counts();
    let good = || vec![spec("a", 1), spec("mine", 1), spec("b", 1)];
    for (bad, kind) in [
        (spec("there", 2), Kind::Precondition),
        (spec("theirs", 2), Kind::Precondition),
        (spec("large", 1 << 40), Kind::Capacity),
        (spec("large", 258_048 << 18), Kind::Capacity),
        (spec("a\u{200b}", 1), Kind::Config),
    ] {
        let name = bad.name.clone();
        let all = [good(), vec![bad]].concat();
        let error = map.register_all(&all, 1, None, now).unwrap_err();
        assert_eq!((error.kind, error.tensor.as_deref()), (kind, Some(&*name)), "{error}");
        assert_eq!(map.counts()[..3], before[..3], "{name}");
    }
    let all = [good(), vec![spec("there", 1), spec("theirs", 1)]].concat();
    let outcomes = map.register_all(&all, 1, None, now).unwrap();
    assert!(matches!(outcomes[3], Registered::Exists(_)));
    assert!(matches!(outcomes[4], Registered::UnderWay { .. }));
    let numbers: Vec<_> = outcomes.into_iter().take(3).map(|outcome| reserved(outcome).0).collect();
    assert_eq!(numbers[1], mine.0);
    assert!(numbers.iter().all(|number| map.check_commit(*number, 1).is_ok()));
    assert_eq!(map.check_commit(numbers[0], 2).unwrap_err().kind, Kind::Precondition);
    let described = map.registrations(&[numbers[2], 4711, numbers[0]]);
    let there: Vec<_> = described.iter().map(|one| one.entry.is_some()).collect();
    assert_eq!(there, [true, false, true]);
}

#[test]
fn one_client_has_no_room_for_more_than_its_registrations() {
    let (mut map, now) = (map(1), Instant::now());
    let specs: Vec<_> = (0..=MAX_OPEN_REGISTRATIONS).map(|k| spec(&format!("w{k}"), 1)).collect();
    let error = map.register_all(&specs, 1, None, now).unwrap_err();
    assert_eq!((error.kind, map.counts()[1]), (Kind::Capacity, 0), "{error}");
    map.register_all(&specs[1..], 1, None, now).unwrap();
}

#[test]
fn identifiers_are_not_guessed_from_each_other() {
    let (mut map, now) = (map(1), Instant::now());
    let (reservation, placement) = reserved(map.register(&spec("w", 258_048 * 100), 1, None, now).unwrap());
    let mut all = [vec![reservation], placement.slices].concat();
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[1] - pair[0] > 1 << 20));
}

#[test]
fn what_its_client_gives_up_ends_unless_it_is_committed() {
    let (mut map, now) = (map(1), Instant::now());
    let (kept, _) = reserved(map.register(&spec("kept", 10), 1, None, now).unwrap());
    let (left, _) = reserved(map.register(&spec("left", 10), 1, None, now).unwrap());
    map.commit(kept, 1).unwrap();
    let both = map.settle(&[left, kept], true, now);
    assert_eq!((both.committed, both.ended), (vec![kept], vec![]));
    let one = map.settle(&[left], true, now);
    assert_eq!((one.committed, one.ended), (vec![], vec![left]));
    assert_eq!(map.commit(left, 1).unwrap_err().kind, Kind::Lease);
}

#[test]
fn a_group_goes_with_its_last_tensor_and_its_last_worker() {
    let (mut map, now) = (map(1), Instant::now());
    let of = |group: &str| TensorSpec { group: group.into(), ..spec("w", 10) };
    let (reservation, first) = reserved(map.register(&of("a"), 1, None, now).unwrap());
    assert!(!map.has_group(first.group), "it is not committed");
    map.commit(reservation, 1).unwrap();
    map.sweep(now, |_| false);
    assert!(map.has_group(first.group));
    map.unregister("w", now, &Scope::Everything).unwrap();
    assert!(!map.has_group(first.group));
    map.sweep(now, |group| group == first.group);
    let (_, again) = reserved(map.register(&of("a"), 1, None, now).unwrap());
    assert_eq!(again.group, first.group, "a worker had a place in it");
    map.abandon(&again.slices, &Scope::Everything);
    map.sweep(now, |_| false);
    let (_, second) = reserved(map.register(&of("a"), 1, None, now).unwrap());
    assert!(second.group > first.group);
}

#[test]
fn a_scope_hides_the_tensors_of_other_groups() {
    let (mut map, now) = (map(1), Instant::now());
    let of = |name: &str, group: &str| TensorSpec { group: group.into(), ..spec(name, 4) };
    for (name, group) in [("a", "one"), ("b", "two")] {
        let (reservation, _) = reserved(map.register(&of(name, group), 1, None, now).unwrap());
        map.commit(reservation, 1).unwrap();
    }
    let (open, placement) = reserved(map.register(&of("c", "two"), 1, None, now).unwrap());
    let one: Scope = "one".parse().unwrap();
    let names = |(entries, _): (Vec<pb::MapEntry>, String)| {
        entries.into_iter().map(|entry| entry.spec.unwrap().name).collect::<Vec<_>>()
    };
    assert_eq!(names(map.page(&[], "", 0, &one)), ["a"]);
    assert_eq!(names(map.page(&["a".into(), "b".into()], "", 0, &one)), ["a"]);
    assert!(map.hides("b", &one) && map.hides("c", &one) && !map.hides("a", &one) && !map.hides("d", &one));
    assert!(map.hides_reservation(open, &one) && !map.hides_reservation(open + 1, &one));
    map.abandon(&placement.slices, &one);
    assert!(map.registration(open).is_some());
    for name in ["b", "c", "d"] {
        let error = map.unregister(name, now, &one).unwrap_err();
        assert!(error.kind == Kind::UnknownTensor && !error.to_string().contains("\"b\", such"), "{error}");
        assert_eq!(map.spec(name, &one).unwrap_err().kind, Kind::UnknownTensor);
    }
    assert_eq!(map.spec("b", &Scope::Everything).unwrap().name, "b".into());
    map.unregister("a", now, &one).unwrap();
}

#[test]
fn a_limited_caller_s_pages_pass_over_no_tensors_of_others() {
    let (mut map, now) = (map(1), Instant::now());
    let mut add = |name: String, group: &str| {
        let spec = TensorSpec { group: group.into(), ..spec(&name, 1) };
        let (reservation, _) = reserved(map.register(&spec, 1, None, now).unwrap());
        map.commit(reservation, 1).unwrap();
    };
    for k in 0..500 {
        add(format!("secret {k:03}"), "other");
        add(format!("run:m/secret {k:03}"), "run:m/default");
        if k % 100 == 50 {
            add(format!("secret {k:03} of a"), "a");
            add(format!("own {k:03}"), "b");
            add(format!("run:n/own {k:03}"), "run:n/default");
        }
    }
    for (scope, own) in
        [("a", 5), ("a,b", 10), ("a,namespace:n", 10), ("namespace:n", 5), ("c", 0), ("*", 1015)]
    {
        let scope: Scope = scope.parse().unwrap();
        for size in [1, 3, 0] {
            let before = map.counts()[3];
            let (mut after, mut found, mut pages) = (String::new(), Vec::new(), 0);
            loop {
                let (page, next) = map.page(&[], &after, size, &scope);
                found.extend(
                    page.into_iter().filter_map(|entry| entry.spec).map(|spec| (spec.name, spec.group)),
                );
                pages += 1;
                if next.is_empty() {
                    break;
                }
                // It names the last tensor of the page.
                assert_eq!(next, found.last().unwrap().0);
                after = next;
            }
            assert_eq!(found.len(), own, "{scope} by {size}");
            assert!(found.is_sorted() && found.iter().all(|(name, group)| scope.allows(name, group)));
            assert!(map.counts()[3] - before <= (own + pages) as u64, "{scope} by {size}");
        }
    }
}

#[test]
fn a_page_of_unknown_names_ends_and_names_one_of_them() {
    let (mut map, now) = (map(1), Instant::now());
    let (reservation, _) = reserved(map.register(&spec("w", 1), 1, None, now).unwrap());
    map.commit(reservation, 1).unwrap();
    let names: Vec<_> = (0..25_000).map(|k| format!("none {k:05}")).chain(["w".to_owned()]).collect();
    let (mut after, mut found, mut pages) = (String::new(), 0, 0);
    loop {
        let before = map.counts()[3];
        let (page, next) = map.page(&names, &after, 0, &Scope::Everything);
        assert!(map.counts()[3] - before <= 10_000);
        (found, pages) = (found + page.len(), pages + 1);
        if next.is_empty() {
            break;
        }
        assert!(next > after && names.contains(&next));
        after = next;
    }
    assert_eq!((found, pages), (1, 3));
}

#[test]
fn a_registration_is_charged_to_its_principal_until_the_tensor_goes() {
    use crate::auth::budget::Budgets;
    use crate::auth::principal::{Limits, Principal};
    use crate::auth::role::Role;
    let limits = Limits { memory: Some(10_000), ..Limits::default() };
    let small = Principal { limits, ..Principal::new("small", Role::Worker, Scope::Everything) };
    let (budgets, mut map, now) = (Budgets::default(), map(1), Instant::now());
    let budget = budgets.of(&small);
    let register =
        |map: &mut Map, name: &str, client| map.register(&spec(name, 1), client, budget.as_ref(), now);
    // Whichever of its clients asks.
    let opened: Vec<_> = (1..100).map_while(|k| register(&mut map, &format!("w{k}"), k).ok()).collect();
    assert!((5..10).contains(&opened.len()), "{}", opened.len());
    let error = register(&mut map, "more", 100).unwrap_err();
    assert_eq!((error.kind, error.expected.as_deref()), (Kind::Capacity, Some("at most 10000 bytes")));
    assert!(map.register(&spec("of another", 1), 101, None, now).is_ok());
    let (reservation, _) = reserved(opened[0].clone());
    map.commit(reservation, 1).unwrap();
    assert!(register(&mut map, "more", 100).is_err());
    map.unregister("w1", now, &Scope::Everything).unwrap();
    register(&mut map, "more", 100).unwrap();
    assert!(register(&mut map, "one more", 100).is_err());
    map.sweep(now + 3 * LEASE, |_| false);
    register(&mut map, "one more", 100).unwrap();
}
