//! The log on standard error. Writing a line never waits for its reader. A warning that recurs appears at
//! growing intervals, and each place in the code may write a limited number of lines in [`PAUSE`]. Each line
//! is text for people, or one JSON object with the same fields.

use fastps_core::text::{printable, without_secrets};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Lines that wait to be written. When there are more, new ones are dropped.
const WAITING: usize = 4096;
/// How long the end of the process waits for the last lines.
const LAST_LINES: Duration = Duration::from_millis(500);
/// Time before the same warning or error appears again; it doubles each time.
const PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_mins(10);
/// Most warnings remembered.
const REMEMBERED: usize = 1024;
/// Most lines of one place in the code in [`PAUSE`]: warnings and errors, and others.
const MOST_WARNINGS: u64 = 30;
const MOST_LINES: u64 = 1000;

/// Format of the lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON object each, for programs.
    Json,
}

enum Message {
    Line(Vec<u8>),
    /// Everything before it has been written.
    Flush(SyncSender<()>),
}

/// Writes lines on a separate thread, so that a stopped terminal or an unread pipe stops only that thread.
#[derive(Clone)]
pub(crate) struct Log {
    lines: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
    is_json: Arc<AtomicBool>,
}

impl Log {
    /// The log of this process, which writes to standard error, or nowhere if that is closed. A second server
    /// in the process has the same one.
    pub(crate) fn of_process() -> io::Result<&'static Self> {
        static LOG: OnceLock<Log> = OnceLock::new();
        if let Some(log) = LOG.get() {
            return Ok(log);
        }
        let out: Box<dyn Write + Send> = match standard_error() {
            Ok(out) => Box::new(out),
            Err(_) => Box::new(io::sink()),
        };
        let log = Self::to(out)?;
        Ok(LOG.get_or_init(|| log))
    }

    fn to(out: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, waiting) = mpsc::sync_channel(WAITING);
        let (dropped, is_json) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counter, json) = (dropped.clone(), is_json.clone());
        std::thread::Builder::new()
            .name("fastps-log".into())
            .spawn(move || write(out, &waiting, &counter, &json))?;
        Ok(Self { lines, dropped, is_json })
    }

    /// Makes this log that of the process. A second call keeps the first one's.
    pub(crate) fn install(&self, filter: Targets, format: Format) {
        self.is_json.store(format == Format::Json, Ordering::Relaxed);
        if format == Format::Json {
            let log = self.clone();
            std::panic::set_hook(Box::new(move |panic| log.end(&panic.to_string())));
        }
        let lines = tracing_subscriber::fmt::layer().with_writer(self.clone());
        let lines = match format {
            Format::Text => lines.boxed(),
            Format::Json => {
                lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
            }
        };
        let lines = lines.with_filter(Repeats { log: Some(self.clone()), ..Repeats::default() });
        let _ = tracing_subscriber::registry().with(lines).with(filter).try_init();
    }

    /// Adds a line about the log itself.
    fn note(&self, level: Level, text: &str) {
        self.line(noted(self.is_json.load(Ordering::Relaxed), level, text).as_bytes());
    }

    /// Adds a line, unless too many wait.
    pub(crate) fn line(&self, text: &[u8]) {
        if self.lines.try_send(Message::Line(text.to_vec())).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Adds an error as the last line, and waits a moment until all lines are written.
    pub(crate) fn end(&self, error: &str) {
        let line = last_line(self.is_json.load(Ordering::Relaxed), error);
        self.send(Message::Line(line.into_bytes()), Instant::now() + LAST_LINES);
        self.flush();
    }

    /// Waits a moment until all lines are written.
    pub(crate) fn flush(&self) {
        let until = Instant::now() + LAST_LINES;
        let (done, wait) = mpsc::sync_channel(1);
        self.send(Message::Flush(done), until);
        let _ = wait.recv_timeout(until.saturating_duration_since(Instant::now()));
    }

    /// Adds a message as soon as there is room.
    fn send(&self, mut message: Message, until: Instant) {
        while let Err(TrySendError::Full(back)) = self.lines.try_send(message) {
            if Instant::now() >= until {
                return;
            }
            message = back;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Standard error without the lock of [`io::stderr`], which a thread that waits for the reader would hold.
#[cfg(unix)]
fn standard_error() -> io::Result<std::fs::File> {
    use std::os::fd::AsFd;
    Ok(io::stderr().as_fd().try_clone_to_owned()?.into())
}

#[cfg(not(unix))]
fn standard_error() -> io::Result<io::Stderr> {
    Ok(io::stderr())
}

/// The line of an error that ends the process.
pub(crate) fn last_line(is_json: bool, error: &str) -> String {
    let error = without_secrets(error);
    let text = if is_json { error.into_owned() } else { format!("error: {error}") };
    noted(is_json, Level::ERROR, &text)
}

/// A line that is no event: about the log itself, or the beginning or end of the process.
pub(crate) fn noted(is_json: bool, level: Level, text: &str) -> String {
    if !is_json {
        return format!("fastps: {}\n", printable(text));
    }
    let mut timestamp = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    let level = level.as_str();
    let line = serde_json::json!({
        "timestamp": timestamp, "level": level, "message": text, "target": module_path!(),
    });
    printable(&line.to_string()) + "\n"
}

fn write(mut out: impl Write, waiting: &Receiver<Message>, dropped: &AtomicU64, is_json: &AtomicBool) {
    for message in waiting {
        let line = match message {
            Message::Line(line) => line,
            Message::Flush(done) => {
                let _ = done.send(());
                continue;
            }
        };
        let _ = out.write_all(&printable_line(&line));
        let lost = dropped.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let text = format!("{lost} lines of the log were dropped: they were not read in time");
            let _ = out.write_all(noted(is_json.load(Ordering::Relaxed), Level::WARN, &text).as_bytes());
        }
    }
}

/// A line without control characters in what others chose. In JSON their meaning stays.
fn printable_line(line: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(line);
    let mut line = printable(text.strip_suffix('\n').unwrap_or(&text)).into_bytes();
    line.push(b'\n');
    line
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Write for Log {
    /// Writes a whole line: the subscriber writes each event with one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Decides which events are written.
#[derive(Default)]
struct Repeats {
    seen: Mutex<HashMap<u64, Seen>>,
    sites: Mutex<HashMap<Identifier, Site>>,
    /// Log that receives the numbers of omitted lines.
    log: Option<Log>,
}

/// A warning or an error with its whole text.
struct Seen {
    /// When it occurred last, and when it may appear again.
    last: Instant,
    next: Instant,
    pause: Duration,
    left_out: u64,
}

/// A place in the code that writes lines.
struct Site {
    since: Instant,
    passed: u64,
    left_out: u64,
}

impl Repeats {
    /// `None` if it must not appear; otherwise how often its text was omitted since it last appeared.
    fn passes(&self, text: u64, now: Instant) -> Option<u64> {
        let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = all.get_mut(&text)
            && now < seen.last + 2 * seen.pause
        {
            seen.last = now;
            if now < seen.next {
                seen.left_out += 1;
                return None;
            }
            seen.pause = (2 * seen.pause).min(LONGEST_PAUSE);
            seen.next = now + seen.pause;
            return Some(std::mem::take(&mut seen.left_out));
        }
        if all.len() >= REMEMBERED {
            all.retain(|_, seen| now < seen.last + 2 * seen.pause);
        }
        if all.len() < REMEMBERED {
            all.insert(text, Seen { last: now, next: now + PAUSE, pause: PAUSE, left_out: 0 });
        }
        Some(0)
    }

    /// As [`Repeats::passes`], for all lines of one place in the code.
    fn admits(&self, site: Identifier, most: u64, now: Instant) -> Option<u64> {
        let mut sites = self.sites.lock().unwrap_or_else(PoisonError::into_inner);
        let site = sites.entry(site).or_insert(Site { since: now, passed: 0, left_out: 0 });
        if now.duration_since(site.since) >= PAUSE {
            (site.since, site.passed) = (now, 0);
        }
        if site.passed >= most {
            site.left_out += 1;
            return None;
        }
        site.passed += 1;
        Some(std::mem::take(&mut site.left_out))
    }

    fn say_left_out(&self, what: &str, count: u64) {
        if let Some(log) = self.log.as_ref().filter(|_| count > 0) {
            log.note(Level::WARN, &format!("{count} lines {what} were left out"));
        }
    }
}

impl<S> Filter<S> for Repeats {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let (site, now) = (event.metadata().callsite(), Instant::now());
        let is_warning = *event.metadata().level() <= Level::WARN;
        if is_warning {
            let mut text = Text(String::new());
            event.record(&mut text);
            let mut hasher = DefaultHasher::new();
            (site.clone(), text.0).hash(&mut hasher);
            let Some(left_out) = self.passes(hasher.finish(), now) else { return false };
            self.say_left_out("that are the same as the next one", left_out);
        }
        let most = if is_warning { MOST_WARNINGS } else { MOST_LINES };
        let Some(left_out) = self.admits(site, most, now) else { return false };
        self.say_left_out("of the kind of the next one", left_out);
        true
    }
}

/// All fields of an event.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{field}={value:?};");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::Sender;

    /// A reader that takes a line when it is asked to.
    struct Stuck(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Stuck {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            let _ = self.1.send(line.to_vec());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nothing_waits_for_a_reader_and_dropped_lines_are_counted() {
        let ((read, asked), (write, lines)) = (mpsc::channel(), mpsc::channel());
        let log = Log::to(Stuck(asked, write)).unwrap();
        let begun = Instant::now();
        for k in 0..WAITING + 100 {
            log.line(format!("line {k}\n").as_bytes());
        }
        log.end("the reason");
        assert!(begun.elapsed() < Duration::from_secs(20));
        drop(read); // from now on all is read
        let text: Vec<u8> = std::iter::from_fn(|| lines.recv_timeout(Duration::from_secs(20)).ok())
            .take_while(|line| !line.starts_with(b"line 4095"))
            .flatten()
            .collect();
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with("line 0\n"), "{}", &text[..100]);
        assert!(text.contains("lines of the log were dropped"), "the log reports the loss");
        log.line(b"again\n");
        log.end("the reason");
        let last: Vec<_> = lines.try_iter().collect();
        assert_eq!(last[last.len() - 2..], [b"again\n".to_vec(), b"fastps: error: the reason\n".to_vec()]);
    }

    #[test]
    fn a_line_has_no_hidden_characters_and_json_keeps_its_meaning() {
        let name = "a\u{9b}2J\u{202e}\nb";
        let line = printable_line(format!("{}\n", serde_json::json!({ "client": name })).as_bytes());
        assert_eq!(line, b"{\"client\":\"a\\u009b2J\\u202e\\nb\"}\n");
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&line).unwrap()["client"], name);
        assert_eq!(printable_line(format!("{name}\n").as_bytes()), b"a\\u009b2J\\u202e\\u000ab\n");
    }

    #[test]
    fn lines_about_the_log_are_json_where_it_is() {
        let line = noted(true, Level::WARN, "a \"quoted\"\nline");
        assert_eq!(line.matches('\n').count(), 1);
        let found: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&found["level"], &found["message"]), (&"WARN".into(), &"a \"quoted\"\nline".into()));
        assert!(found["timestamp"].as_str().unwrap().ends_with('Z'));
        assert_eq!(noted(false, Level::WARN, "text"), "fastps: text\n");
    }

    #[test]
    fn the_same_warning_passes_at_growing_intervals() {
        let (repeats, begin) = (Repeats::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(repeats.passes(1, begin), Some(0));
        assert_eq!(repeats.passes(2, begin), Some(0), "another one");
        let passed: Vec<_> = (1..3600).filter_map(|s| Some((s, repeats.passes(1, at(s))?))).collect();
        assert_eq!(passed[..3], [(10, 9), (30, 19), (70, 39)]);
        assert_eq!(passed.last().map(|(_, left_out)| *left_out), Some(599));
        assert_eq!(repeats.passes(1, at(3600 * 2)), Some(0), "after a silence it is new");
        for text in 0..2 * REMEMBERED as u64 {
            repeats.passes(text, at(3600 * 3));
        }
        assert!(repeats.seen.lock().unwrap().len() <= REMEMBERED);
    }

    #[test]
    fn one_place_does_not_fill_the_log() {
        let (repeats, begin) = (Repeats::default(), Instant::now());
        let site = tracing::callsite!(name: "a", kind: tracing::metadata::Kind::EVENT, fields: x);
        let site = tracing::Callsite::metadata(site).callsite();
        let passed =
            (0..100).filter(|_| repeats.admits(site.clone(), MOST_WARNINGS, begin).is_some()).count();
        assert_eq!(passed as u64, MOST_WARNINGS);
        assert_eq!(repeats.admits(site.clone(), MOST_WARNINGS, begin + PAUSE), Some(100 - MOST_WARNINGS));
        assert_eq!(repeats.admits(site, MOST_WARNINGS, begin + PAUSE), Some(0));
    }
}
