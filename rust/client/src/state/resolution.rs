//! Asks a client's resolver where its servers are: an engine may start a server again at another address.

use crate::address::check_local;
use crate::options::Transport;
use crate::resolver::Resolver;
use crate::state::runtime::lock;
use crate::state::time::jitter;
use fastps_core::error::{Error, Kind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

/// Pause between two questions, which doubles until a server is found.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// A resolver that takes longer is reported in errors; servers that do are asked for again.
const SLOW: Duration = Duration::from_secs(1);

/// Questions to a resolver, at most one at a time, and the last answer.
#[derive(Debug)]
pub(crate) struct Resolution {
    resolver: Arc<dyn Resolver>,
    transport: Transport,
    questions: Mutex<Questions>,
    answer: watch::Sender<Option<Result<Vec<String>>>>,
    /// Addresses that the servers themselves list, by shard.
    listed: Mutex<Vec<String>>,
    closed: AtomicBool,
}

#[derive(Debug)]
struct Questions {
    /// Start of the question under way.
    under_way: Option<Instant>,
    /// Earliest time of the next one.
    next: Instant,
    pause: Duration,
}

impl Resolution {
    pub(crate) fn new(resolver: Arc<dyn Resolver>, transport: Transport) -> Arc<Self> {
        let questions = Questions { under_way: None, next: Instant::now(), pause: FIRST_PAUSE };
        Arc::new(Self {
            resolver,
            transport,
            questions: Mutex::new(questions),
            answer: watch::Sender::new(None),
            listed: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// Asks, or waits for the question under way. Soon after the last answer it returns that one; `None` if
    /// there is no answer within this time.
    pub(crate) async fn ask(self: &Arc<Self>, within: Duration) -> Option<Result<Vec<String>>> {
        let mut answers = self.answer.subscribe();
        if self.begin() {
            let asking = self.clone();
            tokio::spawn(async move {
                let resolution = asking.clone();
                let answer = spawn_blocking(move || resolution.resolve()).await;
                asking.take(answer.unwrap_or_else(|e| {
                    Err(Error::new(
                        Kind::Internal,
                        format!("the resolver {} failed: {e}", asking.resolver.name()),
                    ))
                }));
            });
        } else if lock(&self.questions).under_way.is_none() {
            return self.answer.borrow().clone();
        }
        tokio::time::timeout(within, answers.changed()).await.ok()?.ok()?;
        self.answer.borrow().clone()
    }

    /// The answer to a question that begins now, or after the pause.
    pub(crate) async fn ask_again(self: &Arc<Self>, within: Duration) -> Option<Result<Vec<String>>> {
        let next = lock(&self.questions).next;
        tokio::time::sleep_until(next.into()).await;
        self.ask(within).await
    }

    /// The first answer, which raises the resolver's errors; fails at the deadline.
    pub(crate) async fn first(self: &Arc<Self>, deadline: Instant) -> Result<Vec<String>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let late = || {
            let name = self.resolver.name();
            Error::new(Kind::Deadline, format!("the resolver {name} did not return within {left:.1?}"))
        };
        self.ask(left).await.unwrap_or_else(|| Err(late()))
    }

    /// An answer that differs from these addresses, some time after they were named.
    pub(crate) async fn other_than(self: &Arc<Self>, addresses: &[String]) -> Vec<String> {
        tokio::time::sleep(SLOW).await;
        loop {
            match self.ask_again(MAX_PAUSE).await {
                Some(Ok(answer)) if answer != addresses => return answer,
                _ => {}
            }
        }
    }

    /// Starts a question, unless one is under way or the last answer is recent.
    fn begin(&self) -> bool {
        let (mut questions, now) = (lock(&self.questions), Instant::now());
        let begins = questions.under_way.is_none() && now >= questions.next && self.is_open();
        if begins {
            questions.under_way = Some(now);
        }
        begins
    }

    fn resolve(&self) -> Result<Vec<String>> {
        let answer = self.resolver.resolve(&|| self.is_open())?;
        if answer.is_empty() {
            let empty = Error::new(
                Kind::Config,
                format!("the resolver {} returned no address", self.resolver.name()),
            );
            return Err(empty.expected("host:port or unix:///path", "nothing"));
        }
        for address in &answer {
            check_local(address, self.transport).map_err(|mut error| {
                error.message =
                    format!("the resolver {} returned an {}", self.resolver.name(), error.message);
                error
            })?;
        }
        Ok(answer)
    }

    fn take(&self, answer: Result<Vec<String>>) {
        let mut questions = lock(&self.questions);
        questions.under_way = None;
        questions.next = Instant::now() + jitter(questions.pause);
        questions.pause = (2 * questions.pause).min(MAX_PAUSE);
        drop(questions);
        self.answer.send_replace(Some(answer));
    }

    /// Handles a shard that was found: the next search asks at once.
    pub(crate) fn found(&self) {
        let mut questions = lock(&self.questions);
        (questions.next, questions.pause) = (Instant::now(), FIRST_PAUSE);
    }

    /// Notes the addresses that a server lists.
    pub(crate) fn note_listed(&self, cluster: &[String]) {
        cluster.clone_into(&mut lock(&self.listed));
    }

    /// The address that the servers list for a shard.
    pub(crate) fn listed(&self, shard: u32) -> Option<String> {
        lock(&self.listed).get(shard as usize).cloned()
    }

    /// Reason why the resolver names no address, for errors.
    pub(crate) fn trouble(&self) -> Option<String> {
        let slow =
            lock(&self.questions).under_way.map(|since| since.elapsed()).filter(|waited| *waited > SLOW);
        if let Some(waited) = slow {
            return Some(format!("the resolver {} has not returned for {waited:.1?}", self.resolver.name()));
        }
        match &*self.answer.borrow() {
            Some(Err(error)) => Some(error.to_string()),
            _ => None,
        }
    }

    fn is_open(&self) -> bool {
        !self.closed.load(Ordering::SeqCst)
    }

    /// Ends the questions.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    #[derive(Debug)]
    struct Counting {
        asked: AtomicUsize,
        answer: Result<Vec<String>>,
    }

    impl Resolver for Counting {
        fn name(&self) -> String {
            "counting".to_owned()
        }

        fn resolve(&self, is_open: &dyn Fn() -> bool) -> Result<Vec<String>> {
            assert!(is_open());
            self.asked.fetch_add(1, Ordering::SeqCst);
            self.answer.clone()
        }
    }

    fn counting(answer: Result<Vec<String>>) -> (Arc<Counting>, Arc<Resolution>) {
        let resolver = Arc::new(Counting { asked: AtomicUsize::new(0), answer });
        (resolver.clone(), Resolution::new(resolver, Transport::Auto))
    }

    #[tokio::test]
    async fn links_share_one_question_and_its_answer() {
        let (resolver, resolution) = counting(Ok(vec!["host-a:7070".to_owned()]));
        let wait = Duration::from_mins(1);
        let (a, b) = tokio::join!(resolution.ask(wait), resolution.ask(wait));
        assert_eq!(a.unwrap().unwrap(), ["host-a:7070"]);
        assert_eq!(b.unwrap().unwrap(), ["host-a:7070"]);
        assert_eq!(resolution.ask(wait).await.unwrap().unwrap(), ["host-a:7070"]);
        assert_eq!(resolver.asked.load(Ordering::SeqCst), 1);
        let other = resolution.other_than(&["host-b:7070".to_owned()]).await;
        assert_eq!((other.len(), resolver.asked.load(Ordering::SeqCst)), (1, 2));
    }

    #[tokio::test]
    async fn bad_answers_name_the_resolver() {
        for (answer, text) in [
            (Ok(vec![]), "the resolver counting returned no address"),
            (Ok(vec!["no port".to_owned()]), "the resolver counting returned an invalid address"),
            (Err(Error::new(Kind::Connection, "no such job")), "no such job"),
        ] {
            let (_, resolution) = counting(answer);
            let error = resolution.first(Instant::now() + Duration::from_mins(1)).await.unwrap_err();
            assert!(error.message.contains(text), "{error}");
            assert!(resolution.trouble().unwrap().contains(text));
        }
    }

    #[tokio::test]
    async fn a_closed_client_asks_no_more() {
        let (resolver, resolution) = counting(Ok(vec!["host-a:7070".to_owned()]));
        resolution.close();
        assert_eq!(resolution.ask(Duration::from_mins(1)).await, None);
        assert_eq!(resolver.asked.load(Ordering::SeqCst), 0);
    }

    #[derive(Debug)]
    struct Blocking(Mutex<mpsc::Receiver<()>>);

    impl Resolver for Blocking {
        fn name(&self) -> String {
            "blocking".to_owned()
        }

        fn resolve(&self, _: &dyn Fn() -> bool) -> Result<Vec<String>> {
            let _ = lock(&self.0).recv();
            Ok(vec!["host-a:7070".to_owned()])
        }
    }

    #[tokio::test]
    async fn a_resolver_that_blocks_holds_up_nobody() {
        let (release, blocked) = mpsc::channel();
        let resolution = Resolution::new(Arc::new(Blocking(Mutex::new(blocked))), Transport::Auto);
        let error = resolution.first(Instant::now() + Duration::from_millis(10)).await.unwrap_err();
        assert_eq!(error.kind, Kind::Deadline);
        assert!(error.message.contains("the resolver blocking did not return"), "{error}");
        release.send(()).unwrap();
        let answer = resolution.ask(Duration::from_mins(1)).await.unwrap().unwrap();
        assert_eq!((answer.len(), resolution.trouble()), (1, None));
    }
}
