use super::order::{GROUP, QUEUES};
use super::*;
use std::collections::HashSet;

const RULE: FactorRule = FactorRule { lr: 0.05, regularization: 0.1, biases: true };

/// Factors that differ.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32).map(|i| ((i * 37 + seed) % 101) as f32 / 202.0 - 0.25).collect()
}

fn ratings() -> (Vec<i32>, Vec<i32>, Vec<f32>) {
    let all = (0..60).map(|k| (k % 7, (k * k) % 11, ((k * 5) % 9) as f32 / 3.0 - 1.0));
    let (users, (items, values)) = all.map(|(u, i, r)| (u, (i, r))).unzip();
    (users, items, values)
}

fn epoch(seed: impl Into<Option<u64>>) -> Epoch {
    Epoch { seed: seed.into(), rule: RULE }
}

/// Shuffles all queues and returns their contents.
fn shuffled(order: &mut Order, seed: u64) -> Vec<Vec<u32>> {
    order.divide();
    (0..order.queues.len()).for_each(|queue| order.shuffle(queue, seed));
    queues(order)
}

fn queues(order: &Order) -> Vec<Vec<u32>> {
    order.queues.iter().map(|queue| read(queue).clone()).collect()
}

/// The rule as its formula states it, in float64.
fn reference(rank: usize, rule: FactorRule, passes: usize) -> (Vec<f64>, Vec<f64>) {
    let float = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
    let (mut p, mut q) = (float(numbers(7 * rank, 1)), float(numbers(11 * rank, 2)));
    let (mut b, mut c) = (vec![0.0; 7], vec![0.0; 11]);
    let (users, items, values) = ratings();
    for _ in 0..passes {
        for ((u, i), r) in users.iter().zip(&items).zip(&values) {
            let (u, i) = (*u as usize, *i as usize);
            let dot: f64 = (0..rank).map(|k| p[u * rank + k] * q[i * rank + k]).sum();
            let e = f64::from(*r) - dot - b[u] - c[i];
            for k in 0..rank {
                let (x, y) = (p[u * rank + k], q[i * rank + k]);
                p[u * rank + k] = x + rule.lr * (e * y - rule.regularization * x);
                q[i * rank + k] = y + rule.lr * (e * x - rule.regularization * y);
            }
            if rule.biases {
                b[u] += rule.lr * (e - rule.regularization * b[u]);
                c[i] += rule.lr * (e - rule.regularization * c[i]);
            }
        }
    }
    ([p, b].concat(), [q, c].concat())
}

#[test]
fn one_thread_follows_the_formula() {
    for rank in [1, 13, 14, 15, 16, 40] {
        for rule in [RULE, FactorRule { biases: false, ..RULE }] {
            let (users, items, values) = ratings();
            let ratings = Ratings { users: &users, items: &items, values: &values };
            ratings.check(7, 11).unwrap();
            let (p, q) = (numbers(7 * rank, 1), numbers(11 * rank, 2));
            let model = Factors::new(rank, (&p, &[0.0; 7]), (&q, &[0.0; 11])).unwrap();
            let (mut order, mut passes) = (Order::new(ratings, 7, 1), 0);
            let epoch = Epoch { seed: None, rule };
            let mut next = |_, done| {
                passes += 1;
                assert_eq!(done, 60);
                (passes < 4).then_some(epoch)
            };
            model.train(ratings, &mut order, epoch, 1, &|| false, &mut next).unwrap();
            let (expected_users, expected_items) = reference(rank, rule, 4);
            for ((factors, biases), expected) in
                [(model.users(), expected_users), (model.items(), expected_items)]
            {
                for (x, y) in factors.iter().chain(&biases).zip(expected) {
                    assert!((f64::from(*x) - y).abs() < 2e-6, "rank {rank}: {x} {y}");
                }
            }
        }
    }
}

#[test]
fn an_order_has_every_rating_once_and_each_thread_its_items() {
    let (users, items, values) = ratings();
    let ratings = Ratings { users: &users, items: &items, values: &values };
    for threads in [1, 2, 3, 13, usize::MAX] {
        let mut order = Order::new(ratings, 7, threads);
        assert!(queues(&order).concat().into_iter().eq(0..60));
        let mut orders = Vec::new();
        for seed in [1, 2, 1] {
            let queues = shuffled(&mut order, seed);
            let mut all = queues.concat();
            orders.push(all.clone());
            all.sort_unstable();
            assert!(all.into_iter().eq(0..60));
            let threads = threads.min(QUEUES);
            assert_eq!(queues.len(), threads);
            for (thread, queue) in queues.iter().enumerate() {
                assert!(queue.iter().all(|i| items[*i as usize] as usize % threads == thread));
            }
        }
        assert!(orders[0] != orders[1] && orders[0] == orders[2]);
    }
}

#[test]
fn users_come_in_groups_and_threads_begin_at_different_ones() {
    // 50 users with a rating of each of two items.
    let users: Vec<i32> = (0..100).map(|i| i / 2).collect();
    let items: Vec<i32> = (0..100).map(|i| i % 2).collect();
    let mut order = Order::new(Ratings { users: &users, items: &items, values: &[0.0; 100] }, 50, 2);
    let mut firsts = Vec::new();
    for seed in 0..2 {
        for queue in shuffled(&mut order, seed) {
            let group: HashSet<_> = queue[..GROUP].iter().map(|i| users[*i as usize]).collect();
            assert_eq!(group.len(), GROUP);
            firsts.push(group);
        }
    }
    assert!(firsts[0].is_disjoint(&firsts[1]) && firsts[0] != firsts[2]);
}

#[test]
fn threads_help_each_other_with_what_is_left() {
    // All ratings are of the second thread's items.
    let (users, items, values) = (vec![0; 5000], vec![1; 5000], vec![0.5; 5000]);
    let ratings = Ratings { users: &users, items: &items, values: &values };
    let mut order = Order::new(ratings, 1, 2);
    let model = Factors::new(2, (&[0.1; 2], &[0.0]), (&[0.1; 4], &[0.0; 2])).unwrap();
    let mut learned = |threads, stop: Stop<'_>| {
        let mut learned = Vec::new();
        let mut next = |_, done| {
            learned.push(done);
            (learned.len() < 3).then(|| epoch(7))
        };
        model.train(ratings, &mut order, epoch(1), threads, stop, &mut next).unwrap();
        learned
    };
    for threads in [1, 2, 3] {
        assert_eq!(learned(threads, &|| false), [5000; 3]);
    }
    assert_eq!(learned(2, &|| true), [0; 3]);
}

#[test]
fn what_is_out_of_range_is_refused() {
    let check = |users: &[i32], items: &[i32]| Ratings { users, items, values: &[1.0, 2.0] }.check(3, 4);
    assert_eq!(check(&[0, 2], &[3, 0]), Ok(()));
    for (users, items) in [([0, 3], [0, 0]), ([-1, 0], [0, 0]), ([0, 0], [4, 0]), ([0, 0], [0, i32::MIN])] {
        assert_eq!(check(&users, &items).unwrap_err().kind, Kind::Shape);
    }
    assert_eq!(check(&[0], &[0, 1]).unwrap_err().kind, Kind::Shape);
    assert_eq!(Factors::new(2, (&[0.0; 3], &[0.0; 2]), (&[], &[])).unwrap_err().kind, Kind::Shape);
}
