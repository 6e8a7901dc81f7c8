//! The SHA-256 of a client's session secret, which is all that a shard stores of it. Secrets are 128 random
//! bits, so they need neither salt nor a slow hash.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;
use subtle::ConstantTimeEq;

/// The SHA-256 of a session secret. Comparison takes constant time.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct SecretHash([u8; 32]);

impl SecretHash {
    /// Hashes a secret.
    pub fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }

    /// Its bytes.
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }
}

impl From<[u8; 32]> for SecretHash {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl PartialEq for SecretHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for SecretHash {}

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretHash(..)")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_sha_256_and_is_not_printed() {
        let hash = SecretHash::of(b"abc");
        // FIPS 180-2, appendix B.1.
        assert_eq!(hash.0[..4], [0xba, 0x78, 0x16, 0xbf]);
        assert_eq!(hash.0[28..], [0xf2, 0x00, 0x15, 0xad]);
        assert_eq!(format!("{hash:?}"), "SecretHash(..)");
        assert_eq!(serde_json::from_slice::<SecretHash>(&serde_json::to_vec(&hash).unwrap()).unwrap(), hash);
        let mut other = hash;
        other.0[31] ^= 1;
        assert_ne!(hash, other);
        assert!(serde_json::from_str::<SecretHash>("[1, 2, 3]").is_err());
    }
}
