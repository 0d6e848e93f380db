//! TLS as NBD programs use it: a directory of PEM files with the names that QEMU, nbdkit and libnbd share.
//!
//! | file | server | client |
//! |---|---|---|
//! | `ca-cert.pem` | the authority of accepted clients, if they must show a certificate | the authority of trusted servers |
//! | `ca-crl.pem` | revoked certificates; may be missing | not read |
//! | `server-cert.pem`, `server-key.pem` | shown to clients | |
//! | `client-cert.pem`, `client-key.pem` | | shown to a server that asks; may both be missing |
//!
//! TLS 1.2 and 1.3. Pre-shared keys (PSK) are not supported.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::small_file;
use parking_lot::Mutex;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file has wrong content.
    #[error("cannot use '{path}' for TLS: {why}")]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
    /// A file does not exist.
    #[error("cannot use '{path}' for TLS: there is no such file; it must hold {what} in PEM form")]
    Missing {
        /// Which.
        path: PathBuf,
        /// What it should contain.
        what: String,
    },
    /// The files do not match each other.
    #[error("the TLS files in '{directory}' cannot be used: {why}")]
    Together {
        /// Where they are.
        directory: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The system's own list of authorities cannot be read.
    #[error(
        "no authorities are known to check the server's certificate with: {why}; name a directory with ca-cert.pem \
         by ?tls-certificates=DIR in the URI"
    )]
    NoAuthorities {
        /// Why.
        why: String,
    },
    /// The server's name cannot be a name in a certificate.
    #[error(
        "'{name}' cannot be the name in a server's certificate; give it by ?tls-hostname=NAME in the URI"
    )]
    Name {
        /// The name.
        name: String,
    },
}

/// The identity of a client, as far as the server could verify it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientIdentity {
    /// Whether the connection is encrypted.
    pub is_encrypted: bool,
    /// Names in the client's certificate, which an authority of the server has signed: common name and DNS
    /// names. Empty without a certificate.
    pub names: Vec<String>,
}

/// What a server needs for TLS. The files are read again when they change: existing connections stay, and new
/// clients are shown the new certificate and checked against the new lists.
#[derive(Clone)]
pub struct ServerTls {
    files: Arc<ServerFiles>,
    /// Clients without TLS are refused.
    pub(crate) is_required: bool,
}

/// The files' contents as last read.
struct ServerFiles {
    directory: PathBuf,
    verifies_clients: bool,
    state: Mutex<ServerState>,
}

struct ServerState {
    config: Arc<ServerConfig>,
    /// The stamps of the files when they were last read. After an error the files are read again although
    /// their stamps are equal, because a repair need not change the stamps.
    seen: Stamps,
    /// The error that was logged, if the files cannot be used now.
    logged: Option<String>,
    /// Whether there was a list of revoked certificates.
    has_revoked: bool,
    checked: Instant,
}

/// How often the files are checked for changes, at most.
const CHECK_EVERY: Duration = Duration::from_secs(1);
const REVOKED: &str = "ca-crl.pem";
const SERVER_FILES: [&str; 4] = ["ca-cert.pem", REVOKED, "server-cert.pem", "server-key.pem"];

/// Identifies the state of the files: number, length, and time of change.
type Stamps = [Option<(u64, u64, i64, i64)>; SERVER_FILES.len()];

/// How a server uses TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerTlsOptions {
    /// Whether clients without TLS are refused.
    pub is_required: bool,
    /// Whether clients must show a certificate that `ca-cert.pem` has signed.
    pub verifies_clients: bool,
}

impl ServerTls {
    /// Reads a directory.
    pub fn load(directory: &Path, options: ServerTlsOptions) -> Result<Self, TlsError> {
        let (seen, verifies_clients) = (stamps(directory), options.verifies_clients);
        let (config, has_revoked) = server_config(directory, verifies_clients)?;
        let state =
            Mutex::new(ServerState { config, seen, logged: None, has_revoked, checked: Instant::now() });
        let files = Arc::new(ServerFiles { directory: directory.into(), verifies_clients, state });
        Ok(Self { files, is_required: options.is_required })
    }

    pub(crate) fn connection(&self) -> Result<rustls::Connection, rustls::Error> {
        ServerConnection::new(self.files.current()).map(rustls::Connection::Server)
    }
}

impl ServerFiles {
    fn current(&self) -> Arc<ServerConfig> {
        let mut state = self.state.lock();
        if state.checked.elapsed() >= CHECK_EVERY {
            state.checked = Instant::now();
            // Before the files are read, so that a later change is noticed.
            let seen = stamps(&self.directory);
            if state.seen == seen {
                state.logged = None;
            } else {
                self.read_again(&mut state, seen);
            }
        }
        Arc::clone(&state.config)
    }

    fn read_again(&self, state: &mut ServerState, seen: Stamps) {
        let directory = self.directory.display();
        match server_config(&self.directory, self.verifies_clients) {
            // This is normal while the files are replaced one after the other.
            Err(error) => {
                let logged = Some(error.to_string());
                if logged != state.logged {
                    tracing::warn!(%error, "the TLS files have changed and cannot be used: the previous files stay in use until they are repaired");
                }
                state.logged = logged;
                return;
            }
            // The list of revoked certificates is being replaced: a revoked client must not be admitted
            // meanwhile.
            Ok((_, false)) if state.has_revoked => tracing::warn!(%directory,
                "the list of revoked certificates ({REVOKED}) is missing: the previous files stay in use until it exists again"),
            Ok((config, has_revoked)) => {
                tracing::info!(%directory, "the TLS files were read again");
                (state.config, state.has_revoked) = (config, has_revoked);
            }
        }
        (state.seen, state.logged) = (seen, None);
    }
}

fn stamps(directory: &Path) -> Stamps {
    SERVER_FILES.map(|name| {
        let file = std::fs::metadata(directory.join(name)).ok()?;
        Some((file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
    })
}

/// Reads a server's files. Also returns whether they include a list of revoked certificates.
fn server_config(directory: &Path, verifies_clients: bool) -> Result<(Arc<ServerConfig>, bool), TlsError> {
    let together = |why: String| TlsError::Together { directory: directory.into(), why };
    let provider = Arc::new(default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| together(e.to_string()))?;
    let revoked = Some(directory.join(REVOKED)).filter(|path| verifies_clients && path.exists());
    let builder = if verifies_clients {
        let mut verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(directory)?), provider);
        if let Some(path) = &revoked {
            let lists: Vec<CertificateRevocationListDer<'static>> = objects(path, "revoked certificates")?;
            verifier = verifier.with_crls(lists).allow_unknown_revocation_status();
        }
        builder.with_client_cert_verifier(verifier.build().map_err(|e| together(e.to_string()))?)
    } else {
        builder.with_no_client_auth()
    };
    let (certificates, key) = own(directory, "server")?;
    let mut config = builder.with_single_cert(certificates, key).map_err(|e| together(e.to_string()))?;
    // NBD connections last for hours, so resuming them saves nothing, and tickets are secrets to keep. A
    // resuming client's certificate would not be checked again either, although it may have expired.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok((Arc::new(config), revoked.is_some()))
}

/// What a client's URI says about TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// Directory of PEM files; without one the system's authorities are trusted.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must have, if it is not the host's.
    pub hostname: Option<String>,
}

impl ClientTls {
    pub(crate) fn connection(&self, host: &str) -> Result<rustls::Connection, TlsError> {
        let name = self.hostname.as_deref().unwrap_or(host);
        let server =
            ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name { name: name.to_owned() })?;
        let directory = self.certificates.clone().unwrap_or_default();
        let together = |why: String| TlsError::Together { directory: directory.clone(), why };
        let roots = match &self.certificates {
            Some(directory) => authorities(directory)?,
            None => system_authorities()?,
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| together(e.to_string()))?
            .with_root_certificates(roots);
        let config = match &self.certificates {
            Some(directory) if directory.join("client-cert.pem").exists() => {
                let (certificates, key) = own(directory, "client")?;
                builder.with_client_auth_cert(certificates, key).map_err(|e| together(e.to_string()))?
            }
            _ => builder.with_no_client_auth(),
        };
        let connection =
            ClientConnection::new(Arc::new(config), server).map_err(|e| together(e.to_string()))?;
        Ok(rustls::Connection::Client(connection))
    }
}

/// The names in a certificate: common name and DNS names.
pub(crate) fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    let mut names: Vec<String> = certificate
        .subject()
        .iter_common_name()
        .filter_map(|name| name.as_str().ok())
        .map(ToOwned::to_owned)
        .collect();
    if let Ok(Some(alternatives)) = certificate.subject_alternative_name() {
        for name in &alternatives.value.general_names {
            if let GeneralName::DNSName(name) = name
                && !names.iter().any(|known| known == name)
            {
                names.push((*name).to_owned());
            }
        }
    }
    names
}

fn authorities(directory: &Path) -> Result<RootCertStore, TlsError> {
    let path = directory.join("ca-cert.pem");
    let mut roots = RootCertStore::empty();
    for certificate in objects::<CertificateDer<'static>>(&path, "certificates")? {
        roots.add(certificate).map_err(|e| TlsError::File { path: path.clone(), why: e.to_string() })?;
    }
    Ok(roots)
}

fn system_authorities() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        let why = found.errors.first().map_or_else(|| "the system has no list".into(), ToString::to_string);
        return Err(TlsError::NoAuthorities { why });
    }
    Ok(roots)
}

type Own = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn own(directory: &Path, role: &str) -> Result<Own, TlsError> {
    let certificates = objects(&directory.join(format!("{role}-cert.pem")), "certificates")?;
    let path = directory.join(format!("{role}-key.pem"));
    let pem = pem_of(&path, "a private key")?;
    let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|e| no_pem(&path, "a private key", &e))?;
    Ok((certificates, key))
}

fn objects<T: PemObject>(path: &Path, what: &str) -> Result<Vec<T>, TlsError> {
    let pem = pem_of(path, what)?;
    let all = T::pem_slice_iter(&pem).collect::<Result<Vec<T>, _>>().map_err(|e| no_pem(path, what, &e))?;
    if all.is_empty() {
        return Err(TlsError::File { path: path.into(), why: format!("it has no {what} in PEM form") });
    }
    Ok(all)
}

fn pem_of(path: &Path, what: &str) -> Result<Vec<u8>, TlsError> {
    small_file::read(path, small_file::PEM_MAX_BYTES).map_err(|error| match error.kind() {
        ErrorKind::NotFound => TlsError::Missing { path: path.into(), what: what.to_owned() },
        _ => TlsError::File { path: path.into(), why: format!("it cannot be read: {error}") },
    })
}

fn no_pem(path: &Path, what: &str, error: &rustls::pki_types::pem::Error) -> TlsError {
    TlsError::File { path: path.into(), why: format!("it does not hold {what} in PEM form: {error}") }
}
