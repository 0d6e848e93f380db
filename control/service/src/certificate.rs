//! Client certificates, which some tokens have instead of a secret.
//!
//! A token has one certificate, recognised by its fingerprint (`headwater token create --certificate`). Its authority does
//! not matter. TLS proves that the client has the key. The token expires with the certificate.

use aws_lc_rs::digest::{SHA256, digest};
use headwater_api::{Problem, ProblemKind, words};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::server::ParsedCertificate;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

/// The prefix of fingerprints. It distinguishes the fingerprint of a certificate from the hash of a secret in the database.
pub(crate) const PREFIX: &str = "sha256:";

/// The longest text with a certificate, in bytes.
const PEM_MAX_BYTES: usize = 64 << 10;

/// The fingerprint of the certificate of a TLS client, which has the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown(pub(crate) String);

impl Shown {
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(fingerprint(certificate))
    }
}

/// The fingerprint of a certificate, as OpenSSL and browsers show it.
fn fingerprint(certificate: &[u8]) -> String {
    let hash = digest(&SHA256, certificate);
    let digits: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}{digits}")
}

/// A certificate for a token.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClientCertificate {
    pub(crate) fingerprint: String,
    pub(crate) expires_at_ms: u64,
}

impl ClientCertificate {
    /// Reads the first certificate of a text in PEM. Fails if the certificate is not valid now.
    pub(crate) fn parse(pem: &str, now_ms: u64) -> Result<Self, Problem> {
        let odd = |why: String| {
            Problem::new(ProblemKind::Invalid, format!("this is not a certificate in PEM: {why}"))
                .advise("name the file that begins with '-----BEGIN CERTIFICATE-----', not the key")
        };
        if pem.len() > PEM_MAX_BYTES {
            return Err(odd(format!("it has more than {PEM_MAX_BYTES} bytes")));
        }
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| odd(e.to_string()))?;
        let (_, read) = X509Certificate::from_der(&certificate).map_err(|e| odd(e.to_string()))?;
        // TLS accepts fewer certificates, for instance only those of version 3.
        ParsedCertificate::try_from(&certificate).map_err(|e| {
            Problem::new(ProblemKind::Invalid, format!("TLS cannot use this certificate: {e}")).advise(
                "make a certificate of version 3, for instance by 'openssl x509 -req' with -copy_extensions copy",
            )
        })?;
        let ms = |time: ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0).saturating_mul(1000);
        let (begins_at_ms, expires_at_ms) = (ms(read.validity().not_before), ms(read.validity().not_after));
        let not_valid = |message: String| {
            Problem::new(ProblemKind::Invalid, message)
                .advise("use another certificate, or correct the clock of the server")
        };
        if expires_at_ms <= now_ms {
            return Err(not_valid(format!("the certificate expired at {}", words::time(expires_at_ms))));
        }
        if begins_at_ms > now_ms {
            return Err(not_valid(format!(
                "the certificate is not valid before {}",
                words::time(begins_at_ms)
            )));
        }
        Ok(Self { fingerprint: fingerprint(&certificate), expires_at_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by `openssl req -x509 -newkey ed25519 -nodes -subj /CN=anna -days 3650`, at the end of November 2026.
    const ANNA: &str = include_str!("certificate/anna.pem");

    const FINGERPRINT: &str = "sha256:8d7b2d147cf60b8f24932aa847db2228b72853cd776778a6e7bd4d8efb744eed";
    const BEGINS_AT_MS: u64 = 1_795_996_164_000;
    const EXPIRES_AT_MS: u64 = 2_111_356_164_000;

    #[test]
    fn a_certificate_is_recognised_by_its_fingerprint_while_it_is_valid() {
        let now_ms = 1_796_000_000_000;
        let read = ClientCertificate::parse(ANNA, now_ms).unwrap();
        assert_eq!(read.fingerprint, FINGERPRINT);
        assert_eq!(read.expires_at_ms, EXPIRES_AT_MS);
        for (now_ms, why) in [
            (EXPIRES_AT_MS, "the certificate expired at 2036"),
            (BEGINS_AT_MS - 1, "the certificate is not valid before 2026"),
        ] {
            let refused = ClientCertificate::parse(ANNA, now_ms).unwrap_err();
            assert!(refused.to_string().contains(why), "{refused}");
        }
        let key = "-----BEGIN PRIVATE KEY-----\nMC4=\n-----END PRIVATE KEY-----\n";
        let cut = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
        for odd in ["", "hello", key, cut, &"x".repeat(PEM_MAX_BYTES + 1)] {
            let error = ClientCertificate::parse(odd, now_ms).unwrap_err();
            assert!(error.message.contains("not a certificate in PEM"), "{error}");
        }
    }
}
