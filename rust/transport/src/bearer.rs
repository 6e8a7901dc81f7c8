//! The token that a caller shows, read from a file and again when the file has changed.

use crate::loopback::is_loopback;
use crate::private_file;
use crate::token::{TOKEN_LENGTH, Token};
use fastps_core::error::{Error, Kind, Result};
use http::HeaderMap;
use http::HeaderValue;
use http::header::AUTHORIZATION;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Longest token file, with white space around the token.
const MAX_FILE_BYTES: u64 = TOKEN_LENGTH as u64 + 64;

/// The token of a file, or none. Debug output omits it, and HTTP/2 keeps it in no table.
#[derive(Clone, Default)]
pub struct Bearer(Option<Arc<Source>>);

struct Source {
    file: PathBuf,
    present: Mutex<HeaderValue>,
}

impl Bearer {
    /// Reads the file, which only its owner may read. Without a file no token is shown.
    pub fn open(file: Option<&Path>) -> Result<Self> {
        let source = |file: &Path| {
            let present = Mutex::new(read(file)?);
            Ok(Arc::new(Source { file: file.to_owned(), present }))
        };
        file.map(source).transpose().map(Self)
    }

    /// Reads the file again. Returns the error of a file that cannot be read; the last token stays in force.
    pub fn refresh(&self) -> Result<()> {
        let Some(source) = &self.0 else { return Ok(()) };
        let read = read(&source.file)?;
        *source.present.lock().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    /// Reads the file again after a call was refused. Returns whether the token now differs from the one that
    /// the call showed, also if another call has read it since.
    pub fn has_newer_than(&self, shown: Option<&HeaderValue>) -> bool {
        if let Err(error) = self.refresh() {
            tracing::warn!(%error, "the last token stays in use");
        }
        self.present().as_ref() != shown
    }

    /// Fails if the token would cross a network in plain text.
    pub fn check_address(&self, address: &str, encrypted: bool) -> Result<()> {
        if !self.is_some() || encrypted || is_loopback(address) {
            return Ok(());
        }
        let error =
            Error::new(Kind::Config, "a token is sent to other machines with TLS only, and nothing was sent");
        Err(error.expected("tls_ca, or a server on 127.0.0.1, ::1 or localhost", address))
    }

    /// Returns whether there is a token.
    pub fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Puts the token into the headers of a call or stream.
    pub fn sign(&self, headers: &mut HeaderMap) {
        if let Some(present) = self.present() {
            headers.insert(AUTHORIZATION, present);
        }
    }

    /// The header of the token.
    pub fn present(&self) -> Option<HeaderValue> {
        let source = self.0.as_ref()?;
        Some(source.present.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

fn read(file: &Path) -> Result<HeaderValue> {
    let text = private_file::read(file, MAX_FILE_BYTES)?;
    let token = Token::parse(text.trim()).map_err(|mut error| {
        error.message = format!("{}: {}", file.display(), error.message);
        error
    })?;
    let header = HeaderValue::from_str(&format!("Bearer {}", token.expose()));
    let mut header = header.map_err(|_| Error::new(Kind::Internal, "a token that fits no header"))?;
    header.set_sensitive(true);
    Ok(header)
}

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_some() { "Bearer(..)" } else { "Bearer(none)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, remove_file, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_is_read_again_and_never_shown() {
        let file = std::env::temp_dir().join(format!("fastps-bearer-{}", std::process::id()));
        let (first, second) = (Token::draw().unwrap(), Token::draw().unwrap());
        write(&file, format!("{}\n", first.expose())).unwrap();
        set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let bearer = Bearer::open(Some(&file)).unwrap();
        let shown = |bearer: &Bearer| {
            let mut headers = HeaderMap::new();
            bearer.sign(&mut headers);
            assert!(!format!("{headers:?} {bearer:?}").contains("fps_"));
            headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(shown(&bearer).unwrap(), format!("Bearer {}", first.expose()));
        let before = bearer.present();
        assert!(!bearer.has_newer_than(before.as_ref()));
        write(&file, second.expose()).unwrap();
        for _call in 0..2 {
            assert!(bearer.has_newer_than(before.as_ref()));
        }
        assert_eq!(shown(&bearer).unwrap(), format!("Bearer {}", second.expose()));
        write(&file, &second.expose()[..40]).unwrap();
        let error = bearer.refresh().unwrap_err().to_string();
        assert!(error.contains("characters") && !error.contains(&second.expose()[4..40]), "{error}");
        assert_eq!(shown(&bearer).unwrap(), format!("Bearer {}", second.expose()));
        for (address, encrypted, passes) in [
            ("10.0.0.1:7070", false, false),
            ("host-a:7070", false, false),
            ("10.0.0.1:7070", true, true),
            ("127.0.0.1:7070", false, true),
            ("unix:///run/fastps", false, true),
        ] {
            assert_eq!(bearer.check_address(address, encrypted).is_ok(), passes, "{address}");
        }
        remove_file(&file).unwrap();
        assert!(!bearer.has_newer_than(bearer.present().as_ref()), "the last one stays in use");
        assert_eq!(shown(&Bearer::open(None).unwrap()), None);
    }
}
