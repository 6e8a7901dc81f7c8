//! Files with secrets: tokens, and the lists of their hashes.

use crate::regular_file;
use fastps_core::error::{Error, Kind, Result};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Reads a text file of at most `most` bytes that only its owner can read. A group may read a file of
/// root, as Kubernetes mounts secrets; symbolic links are followed.
pub fn read(file: &Path, most: u64) -> Result<String> {
    let name = file.display();
    let failed = |error: std::io::Error| config(format!("cannot read {name}: {error}"));
    let (open, about) = regular_file::open(file).map_err(failed)?;
    if !is_private(about.mode(), about.uid()) {
        return Err(config(format!("others than its owner can read {name}: run chmod 600 {name}"))
            .expected("mode 600", format!("{:03o}", about.mode() & 0o777)));
    }
    let mut bytes = Vec::new();
    open.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        return Err(config(format!("{name} is too large")).expected(format!("at most {most} bytes"), "more"));
    }
    String::from_utf8(bytes).map_err(|_| config(format!("{name} is not text in UTF-8")))
}

fn is_private(mode: u32, owner: u32) -> bool {
    let by_others = if owner == 0 { 0o037 } else { 0o077 };
    mode & by_others == 0
}

fn config(message: String) -> Error {
    Error::new(Kind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, remove_file, set_permissions, write};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn only_private_files_are_read() {
        let folder = std::env::temp_dir();
        let file = folder.join(format!("fastps-private-{}", std::process::id()));
        let link = folder.join(format!("fastps-private-link-{}", std::process::id()));
        write(&file, "12345678").unwrap();
        symlink(&file, &link).unwrap();
        for (mode, fits) in [(0o600, true), (0o400, true), (0o604, false), (0o660, false), (0o644, false)] {
            set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            let read = read(&link, 8);
            assert_eq!(read.is_ok(), fits, "{mode:o}");
            if let Err(error) = read {
                let says = format!("run chmod 600 {}: expected mode 600, got {mode:03o}", link.display());
                assert!(error.to_string().ends_with(&says), "{error}");
            }
        }
        set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        assert!(read(&file, 7).unwrap_err().to_string().contains("too large"));
        let error = read(&folder, 8).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        write(&file, [0xff]).unwrap();
        assert!(read(&file, 8).unwrap_err().to_string().contains("UTF-8"));
        for path in [&file, &link] {
            remove_file(path).unwrap();
        }
        assert!(read(&file, 8).unwrap_err().to_string().contains("cannot read"));
        for (mode, owner, private) in
            [(0o640, 0, true), (0o640, 1000, false), (0o644, 0, false), (0o620, 0, false)]
        {
            assert_eq!(is_private(mode, owner), private, "{mode:o} of {owner}");
        }
    }
}
