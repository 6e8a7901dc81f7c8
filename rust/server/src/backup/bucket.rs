//! A place for copies of snapshots: S3 and what speaks its protocol, or a folder. Each shard has a folder
//! there with one folder per snapshot, and `latest`, which names the newest complete snapshot and changes
//! by compare-and-swap.

use fastps_core::error::{Error, Kind, Result};
use fastps_durable::copy::Latest;
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    ClientConfigKey, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig,
    UpdateVersion,
};
use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Name of the object that names a shard's newest copy.
pub(super) const LATEST: &str = "latest";
/// Most bytes of that object.
const MAX_LATEST_BYTES: u64 = 64 << 10;
/// Most bytes of a manifest.
pub(super) const MAX_MANIFEST_BYTES: u64 = 1 << 30;
/// Most characters of a failure's reason.
const MAX_REASON_CHARS: usize = 1000;
/// How long one request may take, with its body of some MiB.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(1);
/// Limits on the repetition of a request.
const MAX_RETRIES: usize = 5;
const RETRY_TIMEOUT: Duration = Duration::from_mins(1);

/// Storage of copies.
#[derive(Clone)]
pub struct Bucket {
    pub(super) url: String,
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) prefix: Path,
    /// Set for a folder of this machine, which has no compare-and-swap.
    pub(super) folder: Option<PathBuf>,
}

impl fmt::Debug for Bucket {
    /// Omits the store, whose output would contain its settings.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.url).finish()
    }
}

/// Returns whether this is meant as the URL of a bucket, and not as a path.
pub fn is_url(text: &str) -> bool {
    text.contains("://")
}

/// Runs to completion on a runtime of this thread: the command line has none.
pub(super) fn block<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime
        .map_err(|error| Error::new(Kind::Internal, format!("cannot start a runtime: {error}")))?
        .block_on(work)
}

impl Bucket {
    /// Reads a URL: `s3://bucket/prefix` or `file:///folder`. Accesses nothing yet.
    pub fn open(url: &str) -> Result<Self> {
        let refused = |why: &str| {
            // A URL with a password is not repeated.
            let got = if url.contains('@') { "another URL" } else { url };
            Err(Error::new(Kind::Config, format!("snapshots cannot be copied there: {why}"))
                .expected("s3://BUCKET/PREFIX or file:///FOLDER", got))
        };
        let url = url.trim_end_matches('/');
        if url.contains(['?', '#', '@']) {
            return refused("the URL contains ?, # or @");
        }
        if let Some(path) = url.strip_prefix("file://") {
            let Ok(prefix) = Path::from_url_path(path) else { return refused("the path is not valid") };
            if !path.starts_with('/') || prefix.as_ref().is_empty() {
                return refused("the path is not absolute");
            }
            let store = LocalFileSystem::new().with_fsync(true);
            let Ok(folder) = store.path_to_filesystem(&prefix) else {
                return refused("the path is not valid");
            };
            return Ok(Self { url: url.to_owned(), store: Arc::new(store), prefix, folder: Some(folder) });
        }
        let Some(place) = url.strip_prefix("s3://") else { return refused("the scheme is unknown") };
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let Ok(prefix) = Path::from_url_path(prefix) else {
            return refused("the prefix is not a valid path");
        };
        if bucket.is_empty() {
            return refused("the name of the bucket is empty");
        }
        let retry =
            RetryConfig { max_retries: MAX_RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry);
        // Timeouts in the environment take precedence.
        if std::env::var_os("AWS_TIMEOUT").is_none() {
            builder = builder.with_config(
                AmazonS3ConfigKey::Client(ClientConfigKey::Timeout),
                format!("{} seconds", REQUEST_TIMEOUT.as_secs()),
            );
        }
        check_endpoint(url, &builder)?;
        match builder.build() {
            Ok(store) => Ok(Self { url: url.to_owned(), store: Arc::new(store), prefix, folder: None }),
            Err(error) => Err(without_roots(url).unwrap_or_else(|| {
                let why = reason(&error);
                Error::new(Kind::Config, format!("the settings for {url} (AWS_...) are not valid: {why}"))
            })),
        }
    }

    /// Its URL, without credentials.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A bucket in this store.
    #[cfg(test)]
    pub(crate) fn of(store: Arc<dyn ObjectStore>) -> Self {
        Self { url: "memory://".to_owned(), store, prefix: Path::from("some/prefix"), folder: None }
    }

    /// Folder of a shard's copies.
    pub(super) fn shard(&self, shard: u32) -> Path {
        self.prefix.clone().join(format!("shard-{shard}"))
    }

    /// A place in the bucket, for people.
    pub(super) fn name(&self, place: &Path) -> String {
        let prefix = self.prefix.as_ref();
        let rest = place.as_ref().strip_prefix(prefix).unwrap_or(place.as_ref());
        format!("{}/{}", self.url, rest.trim_start_matches('/'))
    }

    /// Error of a failed request.
    pub(super) fn failed(&self, what: &str, place: &Path, error: &object_store::Error) -> Error {
        use object_store::Error as E;
        let reason = reason(error);
        let (kind, hint) = match error {
            _ if reason.contains("UnknownIssuer") => {
                (Kind::Config, ": SSL_CERT_FILE must name the certificates of its CAs (PEM)")
            }
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                (Kind::Config, ": do AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY permit this?")
            }
            E::NotFound { .. } | E::NotImplemented { .. } => (Kind::Config, ""),
            _ => (Kind::Unavailable, ""),
        };
        Error::new(kind, format!("cannot {what} {}: {reason}{hint}", self.name(place)))
    }

    /// Reads a small object; `None` if it does not exist.
    pub(super) async fn read(&self, place: &Path, most: u64) -> Result<Option<(Vec<u8>, UpdateVersion)>> {
        let failed = |error| self.failed("read", place, &error);
        let got = match self.store.get(place).await {
            Ok(got) => got,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let ObjectMeta { size, e_tag, version, .. } = got.meta.clone();
        if size > most {
            return Err(Error::new(Kind::Internal, format!("{} is not a file of fastps", self.name(place)))
                .expected(format!("at most {most} bytes"), size));
        }
        let mut bytes = Vec::new();
        let mut stream = got.into_stream();
        while let Some(chunk) = stream.try_next().await.map_err(failed)? {
            bytes.extend_from_slice(&chunk);
        }
        Ok(Some((bytes, UpdateVersion { e_tag, version })))
    }

    /// Reads the name of a shard's newest copy, and the version to swap it by.
    pub(super) async fn latest(&self, shard: u32) -> Result<Option<(Latest, UpdateVersion)>> {
        Ok(self.latest_or_fence(shard).await?.filter(|(latest, _)| !latest.is_fence()))
    }

    /// The same, and what stands in its place before there is a copy.
    pub(super) async fn latest_or_fence(&self, shard: u32) -> Result<Option<(Latest, UpdateVersion)>> {
        let place = self.shard(shard).join(LATEST);
        let Some((text, version)) = self.read(&place, MAX_LATEST_BYTES).await? else { return Ok(None) };
        let latest = Latest::parse(&text, &self.name(&place))?;
        if latest.shard != shard {
            return Err(Error::new(Kind::Config, format!("{} is of another shard", self.name(&place)))
                .expected(format!("shard {shard}"), format!("shard {}", latest.shard)));
        }
        Ok(Some((latest, version)))
    }

    /// Replaces `latest`, if it is still the version that was read. Returns false if it has changed since.
    pub(super) async fn swap(&self, latest: &Latest, before: Option<UpdateVersion>) -> Result<bool> {
        let place = self.shard(latest.shard).join(LATEST);
        let put = if self.folder.is_some() {
            self.swap_locked(&place, latest.text()?, before).await
        } else {
            let mode = before.map_or(PutMode::Create, PutMode::Update);
            self.put_if(&place, latest.text()?, mode).await
        };
        match put {
            Ok(()) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
                // The write may have succeeded although its answer was lost, and the retry then failed.
                Ok(self.latest_or_fence(latest.shard).await?.is_some_and(|(found, _)| found == *latest))
            }
            Err(error) => Err(self.failed("write", &place, &error)),
        }
    }

    async fn put_if(&self, place: &Path, text: Vec<u8>, mode: PutMode) -> object_store::Result<()> {
        let options = PutOptions { mode, ..PutOptions::default() };
        self.store.put_opts(place, PutPayload::from(text), options).await.map(drop)
    }

    /// Compares and swaps a file, under a lock.
    async fn swap_locked(
        &self,
        place: &Path,
        text: Vec<u8>,
        before: Option<UpdateVersion>,
    ) -> object_store::Result<()> {
        let Some(before) = before else { return self.put_if(place, text, PutMode::Create).await };
        let generic =
            |source: std::io::Error| object_store::Error::Generic { store: "file", source: source.into() };
        let path = LocalFileSystem::new().path_to_filesystem(place)?.with_extension("lock");
        let lock = File::create(path).map_err(generic)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|error| generic(error.into()))?;
        let found = self.store.head(place).await?;
        if found.e_tag != before.e_tag {
            let (path, source) = (place.to_string(), "it was changed".into());
            return Err(object_store::Error::Precondition { path, source });
        }
        self.put_if(place, text, PutMode::Overwrite).await
    }
}

/// Reports settings that a library would reject later, and in other words.
fn check_endpoint(url: &str, builder: &AmazonS3Builder) -> Result<()> {
    let says = |key| builder.get_config_value(&key);
    let endpoint = says(AmazonS3ConfigKey::S3Endpoint).or_else(|| says(AmazonS3ConfigKey::Endpoint));
    let Some(endpoint) = endpoint else { return Ok(()) };
    let refused = |why: &str, expected: &str| {
        let message = format!("the endpoint for {url} (AWS_ENDPOINT_URL) {why}");
        Err(Error::new(Kind::Config, message).expected(expected, "another one"))
    };
    if endpoint.contains('@') {
        return refused("contains a user name or a password", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY");
    }
    let allowed = says(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
    let allowed = allowed.is_some_and(|allowed| {
        ["1", "true", "on", "yes", "y"].contains(&allowed.to_ascii_lowercase().as_str())
    });
    if endpoint.starts_with("http://") && !allowed {
        return refused("is not encrypted", "https://..., or AWS_ALLOW_HTTP=true");
    }
    Ok(())
}

/// The error of a system without certificates of CAs: the library's does not name them.
fn without_roots(url: &str) -> Option<Error> {
    let found = rustls_native_certs::load_native_certs();
    if !found.certs.is_empty() {
        return None;
    }
    let got = match std::env::var_os("SSL_CERT_FILE") {
        Some(file) => format!("none in {}", file.display()),
        None => "none in the folders of this system".to_owned(),
    };
    let message = format!("no certificates of CAs verify the servers of {url}");
    Some(Error::new(Kind::Config, message).expected("a file of them (PEM) that SSL_CERT_FILE names", got))
}

/// Reason for a failed request, without the rest of a server's or library's text: an answer may repeat
/// tokens, and so may a URL.
pub(super) fn reason(error: &object_store::Error) -> String {
    let text = error.to_string();
    let (said, body) = text.split_once('<').unwrap_or((&text, ""));
    let element = |name: &str| {
        let rest = body.split_once(&format!("<{name}>"))?.1;
        Some(rest.split_once('<')?.0)
    };
    let mut reason = said.trim().trim_end_matches(':').to_owned();
    for detail in [element("Code"), element("Message")].into_iter().flatten() {
        reason = format!("{reason}: {detail}");
    }
    // The text of a connection error says only that it failed.
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let cause = cause.to_string();
    if !text.contains(&cause) && !cause.contains('<') {
        reason = format!("{reason}: {cause}");
    }
    without_queries(&reason).chars().take(MAX_REASON_CHARS).collect()
}

/// Removes queries from URLs, since they may contain tokens.
fn without_queries(text: &str) -> String {
    let shorten = |word: &str| match word.split_once('?') {
        Some((place, _)) if place.contains("://") => format!("{place}?..."),
        _ => word.to_owned(),
    };
    text.split(' ').map(shorten).collect::<Vec<_>>().join(" ")
}

/// Sums bytes as manifests do.
pub(super) struct Sum(crc_fast::Digest, pub(super) u64);

impl Sum {
    pub(super) fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi), 0)
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
        self.1 += bytes.len() as u64;
    }

    /// Returns whether these bytes are the whole file.
    pub(super) fn is(&self, part: fastps_durable::copy::Part) -> bool {
        (self.0.finalize() as u32, self.1) == (part.crc32c, part.bytes)
    }
}
