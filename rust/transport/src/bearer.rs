//! The token that a caller shows, read from a file and again when the file has changed.

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

    /// Reads the file again. Returns whether the token has changed.
    pub fn refresh(&self) -> Result<bool> {
        let Some(source) = &self.0 else { return Ok(false) };
        let read = read(&source.file)?;
        let mut present = source.present.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *present != read;
        *present = read;
        Ok(changed)
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

    fn present(&self) -> Option<HeaderValue> {
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
        assert!(!bearer.refresh().unwrap());
        write(&file, second.expose()).unwrap();
        assert!(bearer.refresh().unwrap());
        assert_eq!(shown(&bearer).unwrap(), format!("Bearer {}", second.expose()));
        write(&file, &second.expose()[..40]).unwrap();
        let error = bearer.refresh().unwrap_err().to_string();
        assert!(error.contains("letters") && !error.contains(&second.expose()[4..40]), "{error}");
        assert_eq!(shown(&bearer).unwrap(), format!("Bearer {}", second.expose()));
        remove_file(&file).unwrap();
        assert_eq!(shown(&Bearer::open(None).unwrap()), None);
    }
}
