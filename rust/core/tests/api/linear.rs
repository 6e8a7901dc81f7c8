//! Linear models: one thread against the plain formula, several threads against one.

use fastps_core::linear::{Csr, Examples, FeatureRows, Linear, Loss, Number, Schedule, Settings, shuffle};

const COLUMNS: usize = 37;
const ROWS: usize = 300;

fn settings() -> Settings {
    Settings {
        loss: Loss::Logistic,
        alpha: 1e-3,
        l1_ratio: 0.0,
        penalty: true,
        schedule: Schedule::Optimal,
        eta0: 0.05,
        power_t: 0.25,
        fit_intercept: true,
        intercept_decay: 1.0,
        average: 0,
        weight_pos: 1.0,
        weight_neg: 1.0,
    }
}

/// Sparse rows of 0 to 9 non-zeros, with targets of a hidden model.
struct Data<I> {
    values: Vec<f32>,
    columns: Vec<I>,
    starts: Vec<I>,
    targets: Vec<f32>,
    weights: Vec<f32>,
    order: Vec<u32>,
}

impl<I: Number + TryFrom<usize>> Data<I> {
    fn new(rows: usize, columns: usize) -> Self {
        let number = |n: usize| I::try_from(n).ok().unwrap();
        let mut random = 12345_u32;
        let mut draw = |n: usize| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as usize % n
        };
        let (mut values, mut places, mut starts) = (vec![], vec![], vec![number(0)]);
        let mut targets = vec![];
        for _ in 0..rows {
            let mut sum = 0.3;
            for column in (0..columns).filter(|_| draw(6) == 0).collect::<Vec<_>>() {
                let value = (draw(200) as f32 - 99.5) / 100.0;
                sum += value * (column as f32 - 18.0) / 9.0;
                values.push(value);
                places.push(number(column));
            }
            starts.push(number(values.len()));
            // One label in ten is wrong.
            let right = if draw(10) == 0 { -1.0 } else { 1.0 };
            targets.push(if sum > 0.0 { right } else { -right });
        }
        let weights = (0..rows).map(|i| 0.5 + (i % 3) as f32 / 2.0).collect();
        Self { values, columns: places, starts, targets, weights, order: (0..rows as u32).collect() }
    }

    fn csr(&self) -> Csr<'_, I> {
        Csr { values: &self.values, columns: &self.columns, starts: &self.starts }
    }

    fn dense(&self, columns: usize) -> Vec<f32> {
        let mut out = vec![0.0; columns * self.targets.len()];
        for i in 0..self.targets.len() {
            for k in self.starts[i].index()..self.starts[i + 1].index() {
                out[i * columns + self.columns[k].index()] = self.values[k];
            }
        }
        out
    }

    fn examples<'a>(&'a self, rows: FeatureRows<'a>) -> Examples<'a> {
        Examples { rows, targets: &self.targets, weights: Some(&self.weights), order: &self.order }
    }
}

/// The plain formula, in float64 and over all coefficients in every step. Returns coefficients and intercept,
/// their means, and the losses of the last pass.
fn reference(s: Settings, x: &[f32], y: &[f32], weights: &[f32], passes: usize) -> (Vec<f64>, Vec<f64>, f64) {
    let n = x.len() / y.len();
    let (mut w, mut q, mut mean) = (vec![0.0_f64; n + 1], vec![0.0; n], vec![0.0; n + 1]);
    let (l2, l1) = if s.penalty { (s.alpha * (1.0 - s.l1_ratio), s.alpha * s.l1_ratio) } else { (0.0, 0.0) };
    let typical = (1.0 / s.alpha.sqrt()).sqrt();
    let first = s.loss.slope(1.0, -typical).max(1.0) / (typical * s.alpha);
    let (mut t, mut u, mut losses, mut averaged) = (1_u64, 0.0, 0.0, 0.0);
    for _ in 0..passes {
        losses = 0.0;
        for (i, row) in x.chunks_exact(n).enumerate() {
            let y = f64::from(y[i]);
            let eta = match s.schedule {
                Schedule::Constant => s.eta0,
                Schedule::Optimal => 1.0 / (s.alpha * (first + t as f64 - 1.0)),
                Schedule::InvScaling => s.eta0 / (t as f64).powf(s.power_t),
            };
            let p = row.iter().zip(&w).map(|(x, w)| f64::from(*x) * w).sum::<f64>() + w[n];
            losses += s.loss.value(y, p);
            let class = if y > 0.0 { s.weight_pos } else { s.weight_neg };
            let update = -eta * s.loss.slope(y, p) * class * f64::from(weights[i]);
            u += l1 * eta;
            for j in 0..n {
                w[j] = w[j] * (1.0 - l2 * eta).max(0.0) + update * f64::from(row[j]);
            }
            w[n] += update * s.intercept_decay;
            for j in (0..n).filter(|j| l1 > 0.0 && row[*j] != 0.0) {
                let before = w[j];
                if before > 0.0 {
                    w[j] = (before - (u + q[j])).max(0.0);
                } else if before < 0.0 {
                    w[j] = (before + (u - q[j])).min(0.0);
                }
                q[j] += w[j] - before;
            }
            if s.average > 0 && t >= s.average {
                averaged += 1.0;
                mean.iter_mut().zip(&w).for_each(|(m, w)| *m += w);
            }
            t += 1;
        }
    }
    for m in &mut mean {
        *m /= averaged;
    }
    (w, mean, losses)
}

fn distance(a: &[f32], b: &[f64]) -> f64 {
    let size = b.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0_f64, |m, (a, b)| m.max((f64::from(*a) - b).abs())) / size
}

#[test]
fn one_thread_follows_the_formula() {
    let data = Data::<i32>::new(ROWS, COLUMNS);
    let wide = Data::<i64>::new(ROWS, COLUMNS);
    let dense = data.dense(COLUMNS);
    let losses = [Loss::Logistic, Loss::Hinge, Loss::SquaredHinge, Loss::Squared, Loss::Huber(0.3)];
    let penalties = [(true, 0.0), (true, 1.0), (true, 0.3), (false, 0.0)];
    let schedules = [Schedule::Constant, Schedule::Optimal, Schedule::InvScaling];
    for loss in losses {
        for (penalty, l1_ratio) in penalties {
            for (schedule, average) in schedules.into_iter().flat_map(|s| [(s, 0), (s, 1), (s, 700)]) {
                // The shortcuts must not show even if steps shrink the coefficients to zero.
                for (alpha, eta0) in [(1e-3, 0.05), (2.0, 0.3), (8.0, 0.125)] {
                    // With a step that long, squared errors grow and the result means nothing.
                    let unbounded = !matches!(loss, Loss::Logistic | Loss::Hinge);
                    if unbounded && schedule == Schedule::Optimal && alpha < 1.0 {
                        continue;
                    }
                    let base = settings();
                    let s = Settings { loss, penalty, l1_ratio, schedule, average, alpha, eta0, ..base };
                    let s = Settings { intercept_decay: 0.5, weight_pos: 1.5, weight_neg: 0.75, ..s };
                    let (expected, mean, losses) = reference(s, &dense, &data.targets, &data.weights, 3);
                    let mut all = vec![FeatureRows::Csr32(data.csr()), FeatureRows::Csr64(wide.csr())];
                    // Dense rows have zeros, to which an L1 penalty also applies.
                    if s.l1_ratio == 0.0 || !s.penalty {
                        all.push(FeatureRows::Dense(&dense));
                    }
                    for rows in all {
                        rows.check(ROWS, COLUMNS).unwrap();
                        let mut model = Linear::new(s, &[0.0; COLUMNS], 0.0, 1).unwrap();
                        let mut last = 0.0;
                        for _ in 0..3 {
                            let pass = model.pass(data.examples(rows), 1, true, &|| false).unwrap();
                            assert_eq!(pass.examples, ROWS);
                            last = pass.loss;
                        }
                        let what = format!("{s:?}");
                        let mut got = model.coefficients();
                        got.push(model.intercept() as f32);
                        assert!(distance(&got, &expected) < 2e-5, "{} {what}", distance(&got, &expected));
                        assert!((last / losses - 1.0).abs() < 1e-4, "{last} {losses} {what}");
                        assert_eq!(model.average().is_some(), average > 0);
                        if let Some((mut got, intercept)) = model.average() {
                            got.push(intercept as f32);
                            assert!(distance(&got, &mean) < 2e-5, "mean {} {what}", distance(&got, &mean));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn several_threads_find_the_same_model() {
    let (rows, columns) = (20_000, 500);
    let data = Data::<i32>::new(rows, columns);
    for schedule in [Schedule::Optimal, Schedule::Constant, Schedule::InvScaling] {
        for (l1_ratio, average) in [(0.0, 0), (0.3, 0), (0.0, 1)] {
            let s = Settings { schedule, l1_ratio, average, alpha: 1e-2, eta0: 0.01, ..settings() };
            let losses: Vec<f64> = [1, 2, 3]
                .into_iter()
                .map(|threads| {
                    let mut model = Linear::new(s, &vec![0.0; columns], 0.0, 1).unwrap();
                    let mut order = data.order.clone();
                    for epoch in 0..3 {
                        shuffle(&mut order, epoch);
                        let examples =
                            Examples { order: &order, ..data.examples(FeatureRows::Csr32(data.csr())) };
                        model.pass(examples, threads, false, &|| false).unwrap();
                    }
                    assert_eq!(model.t(), 60_001);
                    let (coef, intercept) =
                        model.average().unwrap_or_else(|| (model.coefficients(), model.intercept()));
                    let loss = |i: usize| {
                        let range = data.starts[i].index()..data.starts[i + 1].index();
                        let products = range.map(|k| data.values[k] * coef[data.columns[k].index()]);
                        s.loss.value(f64::from(data.targets[i]), f64::from(products.sum::<f32>()) + intercept)
                    };
                    (0..rows).map(loss).sum::<f64>() / rows as f64
                })
                .collect();
            for loss in &losses {
                assert!((loss / losses[0] - 1.0).abs() < 0.02, "{losses:?} {s:?}");
            }
        }
    }
}

/// All features are positive and occur together, so what one thread learns about one affects all the others.
#[test]
fn threads_that_learn_the_same_neither_overshoot_nor_fall_behind() {
    let (rows, columns) = (32_768, 24);
    let mut random = 99_u32;
    let mut draw = || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) as f32 / (1 << 24) as f32
    };
    let values: Vec<f32> = (0..rows * columns).map(|_| draw()).collect();
    let row = |i: usize| &values[i * columns..(i + 1) * columns];
    let targets: Vec<f32> = (0..rows)
        .map(|i| row(i).iter().enumerate().map(|(j, x)| x * (j as f32 - 8.0)).sum::<f32>() + 4.0 * draw())
        .collect();
    let order: Vec<u32> = (0..rows as u32).collect();
    // From steps that reach the optimum within a few examples to steps that are far from it after the pass.
    for eta0 in [0.03, 0.003, 1e-5, 1e-7] {
        let s = Settings {
            loss: Loss::Squared,
            schedule: Schedule::Constant,
            penalty: false,
            eta0,
            ..settings()
        };
        let loss = |threads| {
            let mut model = Linear::new(s, &vec![0.0; columns], 0.0, 1).unwrap();
            let examples = Examples {
                rows: FeatureRows::Dense(&values),
                targets: &targets,
                weights: None,
                order: &order,
            };
            model.pass(examples, threads, false, &|| false).unwrap();
            let (coef, intercept) = (model.coefficients(), model.intercept());
            let p =
                |i: usize| row(i).iter().zip(&coef).map(|(x, w)| f64::from(x * w)).sum::<f64>() + intercept;
            (0..rows).map(|i| s.loss.value(f64::from(targets[i]), p(i))).sum::<f64>() / rows as f64
        };
        // A thread that the system resumes last may end a pass with a step that is long out of date.
        let losses = [1, 2, 4].map(|threads| {
            let mut passes = [0; 3].map(|_| loss(threads));
            passes.sort_by(f64::total_cmp);
            passes[1]
        });
        // Long steps end anywhere around the optimum, which is at .67; short ones get as far towards it as
        // one thread's.
        let most = if eta0 < 1e-4 { 1.1 } else { 3.0 };
        assert!(losses.iter().all(|loss| *loss < most * losses[0]), "{eta0}: {losses:?}");
    }
}

#[test]
fn one_thread_repeats_itself() {
    let data = Data::<i32>::new(ROWS, COLUMNS);
    let run = || {
        let mut model = Linear::new(settings(), &[0.0; COLUMNS], 0.0, 1).unwrap();
        for _ in 0..3 {
            model.pass(data.examples(FeatureRows::Csr32(data.csr())), 1, false, &|| false).unwrap();
        }
        (model.coefficients(), model.intercept().to_bits())
    };
    assert_eq!(run(), run());
}

#[test]
fn a_stopped_pass_keeps_what_was_learned_and_continues() {
    let data = Data::<i32>::new(3000, COLUMNS);
    let whole = data.examples(FeatureRows::Csr32(data.csr()));
    for threads in [1, 3] {
        let mut model = Linear::new(settings(), &[0.0; COLUMNS], 0.0, 1).unwrap();
        let calls = std::sync::atomic::AtomicU32::new(0);
        let stop = || calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) >= 6;
        let pass = model.pass(whole, threads, false, &stop).unwrap();
        assert!(pass.examples > 0 && pass.examples < 3000);
        assert_eq!(model.t(), 1 + pass.examples as u64);
        let rest = Examples { order: &data.order[pass.examples..], ..whole };
        model.pass(rest, 1, false, &|| false).unwrap();
        let mut straight = Linear::new(settings(), &[0.0; COLUMNS], 0.0, 1).unwrap();
        straight.pass(whole, 1, false, &|| false).unwrap();
        if threads == 1 {
            let straight: Vec<f64> = straight.coefficients().into_iter().map(f64::from).collect();
            assert!(distance(&model.coefficients(), &straight) < 1e-6);
        }
    }
}

#[test]
fn training_continues_from_a_saved_state() {
    let data = Data::<i32>::new(ROWS, COLUMNS);
    let s = Settings { average: 100, ..settings() };
    let examples = data.examples(FeatureRows::Csr32(data.csr()));
    let mut whole = Linear::new(s, &[0.0; COLUMNS], 0.0, 1).unwrap();
    whole.pass(examples, 1, false, &|| false).unwrap();
    let (coef, intercept) = whole.average().unwrap();
    let saved = Linear::new(s, &whole.coefficients(), whole.intercept(), whole.t()).unwrap();
    let mut other = saved.with_average(&coef, intercept);
    whole.pass(examples, 1, false, &|| false).unwrap();
    other.pass(examples, 1, false, &|| false).unwrap();
    let expected: Vec<f64> = whole.average().unwrap().0.into_iter().map(f64::from).collect();
    assert!(distance(&other.average().unwrap().0, &expected) < 1e-6);
    assert_eq!(whole.coefficients(), other.coefficients());
}
