//! The state of a run as numbers; `README.md` has the tables.

use crate::member::Member;
use crate::problems::Problem;
use crate::run::Run;

/// Pulls, computes, pushes, waits, is paused, is gone.
const PULLS: f64 = 0.0;
const COMPUTES: f64 = 1.0;
const PUSHES: f64 = 2.0;
const WAITS: f64 = 3.0;
const PAUSED: f64 = 4.0;
const GONE: f64 = 5.0;

/// Writes the state of a run and of its workers; returns the number of workers.
pub(crate) fn read(run: &mut Run, output: &mut Vec<f64>) -> u32 {
    let Run { settings, server, members, .. } = run;
    let residuals: Vec<Option<f64>> = members
        .iter_mut()
        .map(|member| member.worker.as_mut().and_then(|worker| worker.residual(server, settings)))
        .collect();
    let (sum, having) = residuals.iter().flatten().fold((0.0, 0.0), |(sum, n), r| (sum + r, n + 1.0));
    let ([x, y], now) = (run.point(), run.now);
    let (mut waited, mut present) = (0.0, 0.0);
    for member in &run.members {
        waited += member.waited + member.since.map_or(0.0, |since| now - since);
        present += member.left.unwrap_or(now) - member.born;
    }
    let momentum =
        if run.has_momentum() && run.updates > 0 { run.server.in_force().momentum } else { f64::NAN };
    let loss = match run.settings.problem {
        Problem::Toy(toy) => (toy.at)(x, y).0,
        Problem::Digits => run.log.loss,
    };
    let [fitted, rate] = run.fit.solve();
    let log = &run.log;
    output.extend([
        now,
        run.updates as f64,
        run.server.version() as f64,
        x,
        y,
        loss,
        run.members.len() as f64,
        log.bytes() as f64,
        log.plain_bytes as f64,
        log.acknowledged as f64,
        log.refused as f64,
        if having > 0.0 { sum / having } else { 0.0 },
        momentum,
        if present > 0.0 { waited / present } else { 0.0 },
        log.diverged as f64,
        log.rows.count as f64,
        log.messages.count as f64,
        log.error,
        fitted,
        rate,
        f64::from(u8::from(run.stands())),
        log.handled as f64,
        0.0,
        0.0,
    ]);
    for (k, (member, residual)) in run.members.iter().zip(residuals).enumerate() {
        let (state, since, until) = state(member, now);
        let worker = member.worker.as_ref();
        let [x, y] = worker.map_or([f64::NAN; 2], |worker| run.in_plane(&worker.values));
        let version = worker.and_then(|worker| worker.installed.iter().map(|base| base.version).min());
        output.extend([
            k as f64,
            state,
            x,
            y,
            version.unwrap_or(0) as f64,
            member.step as f64,
            since,
            until,
            member.applied as f64,
            member.waited + member.since.map_or(0.0, |since| now - since),
            member.staleness.map_or(-1.0, |staleness| staleness as f64),
            residual.unwrap_or(0.0),
            member.born,
            member.left.unwrap_or(f64::INFINITY),
        ]);
    }
    run.members.len() as u32
}

/// A member's state, with its start and end.
fn state(member: &Member, now: f64) -> (f64, f64, f64) {
    if member.dead || member.left.is_some() {
        return (GONE, member.left.unwrap_or(member.silent), f64::INFINITY);
    }
    if member.paused(now) {
        return (PAUSED, member.silent, member.resumes);
    }
    if let Some(since) = member.since {
        return (WAITS, since, f64::INFINITY);
    }
    let (pulled, computed) = (member.began + member.delay, member.arrives - member.delay);
    if now < pulled {
        (PULLS, member.began, pulled)
    } else if now < computed {
        (COMPUTES, pulled, computed)
    } else {
        (PUSHES, computed, member.arrives)
    }
}
