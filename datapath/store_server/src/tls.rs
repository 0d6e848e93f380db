//! The server's certificate and key. They are reloaded when their files change, so that a renewal needs no
//! restart and closes no connection.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::small_file;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{Error, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoClientAuth, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::error::ServeError;
use crate::server::TlsFiles;

/// How often the files are checked for changes, at most.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long before a certificate's expiry the log warns.
const EXPIRES_SOON: Duration = Duration::from_hours(14 * 24);
/// The time between two such warnings.
const LOG_INTERVAL: Duration = Duration::from_hours(24);

/// The ALPN names of the HTTP versions that are served.
pub(crate) const HTTP: [&str; 2] = ["h2", "http/1.1"];

/// A configuration for TLS 1.3 and 1.2 with these ALPN protocols. It reloads the files when they change. `clients` verifies
/// certificates of clients. Without it, clients are not asked for a certificate.
pub fn config(
    files: &TlsFiles,
    protocols: &[&str],
    clients: Option<Arc<dyn ClientCertVerifier>>,
) -> Result<Arc<ServerConfig>, ServeError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let certificates = Certificates::open(files, Arc::clone(&provider))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| unusable(&files.certificate, e.to_string()))?
        .with_client_cert_verifier(clients.unwrap_or_else(|| Arc::new(NoClientAuth)))
        .with_cert_resolver(Arc::new(certificates));
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    Ok(Arc::new(config))
}

/// The files, and the pair that was read from them last.
#[derive(Debug)]
struct Certificates {
    files: TlsFiles,
    provider: Arc<CryptoProvider>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    pair: Arc<CertifiedKey>,
    /// The state of both files when they were last used. Unusable files are tried again even without a
    /// change, because a repair may leave these stamps as they are.
    seen: [Option<Stamp>; 2],
    /// Why the files cannot be used now, as it was logged.
    failed: Option<String>,
    checked_at: Instant,
    /// When the coming expiry was last logged.
    expiry_logged_at: Option<Instant>,
}

/// Identifies the state of a file: inode, length, and time of change.
type Stamp = (u64, u64, i64, i64);

impl Certificates {
    fn open(files: &TlsFiles, provider: Arc<CryptoProvider>) -> Result<Self, ServeError> {
        let seen = stamps(files);
        let pair = Arc::new(read(files, &provider)?);
        let mut state =
            State { pair, seen, failed: None, checked_at: Instant::now(), expiry_logged_at: None };
        log_expiry(files, &mut state);
        Ok(Self { files: files.clone(), provider, state: Mutex::new(state) })
    }

    fn current(&self) -> Arc<CertifiedKey> {
        let mut state = self.state.lock();
        if state.checked_at.elapsed() >= CHECK_INTERVAL {
            state.checked_at = Instant::now();
            self.reload_if_changed(&mut state);
            log_expiry(&self.files, &mut state);
        }
        Arc::clone(&state.pair)
    }

    fn reload_if_changed(&self, state: &mut State) {
        // Taken before the files are read, so that later changes are read again.
        let seen = stamps(&self.files);
        if state.seen == seen {
            state.failed = None;
            return;
        }
        match read(&self.files, &self.provider) {
            Ok(pair) => {
                tracing::info!(certificate = %self.files.certificate.display(), "the certificate was reloaded");
                (state.pair, state.expiry_logged_at) = (Arc::new(pair), None);
                (state.seen, state.failed) = (seen, None);
            }
            // Normal while the two files are replaced one after the other.
            Err(e) => {
                let failed = Some(e.to_string());
                if failed != state.failed {
                    tracing::warn!(error = %e,
                        "the changed certificate and key cannot be used: the previous ones stay in use until the files are repaired");
                }
                state.failed = failed;
            }
        }
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

fn stamps(files: &TlsFiles) -> [Option<Stamp>; 2] {
    [&files.certificate, &files.key].map(|path| {
        let file = std::fs::metadata(path).ok()?;
        Some((file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
    })
}

fn unusable(file: &Path, why: String) -> ServeError {
    ServeError::Tls { file: file.to_owned(), why }
}

fn read(files: &TlsFiles, provider: &CryptoProvider) -> Result<CertifiedKey, ServeError> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem_of(&files.certificate)?)
        .collect::<Result<_, _>>()
        .map_err(|e| unusable(&files.certificate, e.to_string()))?;
    if chain.is_empty() {
        return Err(unusable(&files.certificate, "it holds no certificate in PEM".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_slice(&pem_of(&files.key)?).map_err(|e| match e {
        Error::NoItemsFound => unusable(&files.key, "it holds no private key in PEM".to_owned()),
        e => unusable(&files.key, e.to_string()),
    })?;
    CertifiedKey::from_der(chain, key, provider).map_err(|e| {
        unusable(&files.key, format!("{e}; it must be the key of {}", files.certificate.display()))
    })
}

fn pem_of(file: &Path) -> Result<Vec<u8>, ServeError> {
    let tried = || format!("cannot use {} for TLS", file.display());
    small_file::read(file, small_file::PEM_MAX_BYTES)
        .map_err(|source| ServeError::Io { tried: tried(), source })
}

/// Logs that the certificate expires soon, or has expired. Clients then refuse it, and report that where no
/// administrator of this server sees it.
fn log_expiry(files: &TlsFiles, state: &mut State) {
    if state.expiry_logged_at.is_some_and(|expiry_logged_at| expiry_logged_at.elapsed() < LOG_INTERVAL) {
        return;
    }
    let now = DefaultTimeProvider.current_time().and_then(|now| i64::try_from(now.as_secs()).ok());
    let ends = state.pair.cert.first().and_then(|certificate| ends_at(certificate));
    let (Some(now), Some(ends)) = (now, ends) else { return };
    let left_hours = ends.saturating_sub(now).div_euclid(3600);
    let certificate = files.certificate.display();
    if ends <= now {
        tracing::error!(%certificate, "the certificate has expired, and clients refuse it: replace it and its key");
    } else if ends.saturating_sub(now).unsigned_abs() < EXPIRES_SOON.as_secs() {
        tracing::warn!(%certificate, left_hours, "the certificate expires soon: replace it and its key");
    } else {
        return;
    }
    state.expiry_logged_at = Some(Instant::now());
}

/// Until when a certificate is valid, in seconds since 1970.
fn ends_at(certificate: &CertificateDer<'_>) -> Option<i64> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(files: &TlsFiles) -> Vec<u8> {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        // As new files, because times of change are coarse, and the length may be the same.
        let put = |path: &Path, pem: String| {
            let beside = path.with_extension("new");
            std::fs::write(&beside, pem).unwrap();
            std::fs::rename(&beside, path).unwrap();
        };
        put(&files.certificate, made.cert.pem());
        put(&files.key, made.signing_key.serialize_pem());
        made.cert.der().to_vec()
    }

    #[test]
    fn a_new_matching_pair_replaces_the_previous_one() {
        let dir = tempfile::tempdir().unwrap();
        let files = TlsFiles { certificate: dir.path().join("cert.pem"), key: dir.path().join("key.pem") };
        let first = make(&files);
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let certificates = Certificates::open(&files, provider).unwrap();
        let shown = || {
            certificates.state.lock().checked_at -= CHECK_INTERVAL * 2;
            certificates.current().cert[0].to_vec()
        };
        assert!(shown() == first);
        let key = std::fs::read(&files.key).unwrap();
        let second = make(&files);
        assert!(shown() == second);
        // A key of another certificate, invalid content, and a missing file: the last good pair stays.
        std::fs::write(&files.key, &key).unwrap();
        assert!(shown() == second);
        std::fs::write(&files.key, "").unwrap();
        assert!(shown() == second);
        std::fs::remove_file(&files.key).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &files.key).unwrap();
        assert!(shown() == second);
        std::fs::remove_file(&files.key).unwrap();
        std::fs::remove_file(&files.certificate).unwrap();
        assert!(shown() == second);
        let third = make(&files);
        assert!(shown() == third);
        // A repaired file need not look changed.
        let fourth = make(&files);
        let good = std::fs::read(&files.key).unwrap();
        let put = |bytes: &[u8]| {
            std::fs::write(&files.key, bytes).unwrap();
            std::fs::File::open(&files.key).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        };
        put(&vec![b'x'; good.len()]);
        assert!(shown() == third);
        put(&good);
        assert!(shown() == fourth);
    }

    #[test]
    fn a_coming_certificate_expiry_is_logged_once() {
        let dir = tempfile::tempdir().unwrap();
        let files = TlsFiles { certificate: dir.path().join("cert.pem"), key: dir.path().join("key.pem") };
        let mut parameters = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        parameters.not_after = rcgen::date_time_ymd(2001, 9, 9);
        let key = rcgen::KeyPair::generate().unwrap();
        let expired = parameters.self_signed(&key).unwrap();
        assert_eq!(ends_at(expired.der()), Some(999_993_600));
        let expiry_logged_at = |certificates: &Certificates| certificates.state.lock().expiry_logged_at;
        let open = || {
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            Certificates::open(&files, provider).unwrap()
        };
        std::fs::write(&files.certificate, expired.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        let certificates = open();
        let when = expiry_logged_at(&certificates);
        assert!(when.is_some());
        certificates.state.lock().checked_at -= CHECK_INTERVAL * 2;
        certificates.current();
        assert_eq!(expiry_logged_at(&certificates), when);
        // A certificate that is valid for long is not mentioned.
        make(&files);
        certificates.state.lock().checked_at -= CHECK_INTERVAL * 2;
        certificates.current();
        assert_eq!((expiry_logged_at(&certificates), expiry_logged_at(&open())), (None, None));
    }
}
