//! The daemon's TCP ports: plain HTTP on the loopback interface, and TLS everywhere else. The port of the API accepts client
//! certificates; which permissions they give is decided by the tokens.
//!
//! The certificate is that of `--tls-cert`, or one that the daemon makes once for itself, in `DIR/tls`. Clients
//! recognise the latter by its fingerprint, as SSH clients recognise a host by its key.

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use aws_lc_rs::digest::{SHA256, digest};
use headwater_api::{Problem, ProblemKind};
use headwater_service::server::Port;
use headwater_service::web::Reachable;
use headwater_store_server::{TlsFiles, tls};
use rcgen::{CertificateParams, DnType, KeyPair, date_time_ymd};
use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme, crypto,
};

use crate::data_dir::DataDir;
use crate::replace::replace;

/// The only version of HTTP on these ports.
const HTTP: [&str; 1] = ["http/1.1"];

/// The prefix of a certificate's fingerprint.
pub const FINGERPRINT_PREFIX: &str = "sha256:";

/// The ports of the API and the console.
pub struct Ports {
    /// The port of the API.
    pub api: Option<Port>,
    /// The port of the console.
    pub console: Option<Port>,
    /// The URLs of both ports, and the fingerprint of the daemon's own certificate if that is used.
    pub reachable: Reachable,
}

impl Ports {
    /// Binds the ports. `given` is the certificate for addresses other than loopback.
    pub async fn bind(
        api: Option<SocketAddr>,
        console: Option<SocketAddr>,
        given: Option<TlsFiles>,
        data_dir: &DataDir,
    ) -> anyhow::Result<Self> {
        let mut configs = None;
        let mut reachable = Reachable::default();
        if [api, console].iter().flatten().any(|address| !address.ip().is_loopback()) {
            let files = match given {
                Some(files) => files,
                None => {
                    let files = own_files(data_dir)?;
                    reachable.fingerprint = Some(fingerprint_of(&files.certificate)?);
                    files
                }
            };
            // The console asks for no certificate: browsers would show a question to their users.
            let clients = AnyCertificate::verifier();
            configs = Some((tls::config(&files, &HTTP, Some(clients))?, tls::config(&files, &HTTP, None)?));
        }
        let bind = async |address: Option<SocketAddr>,
                          tls: Option<Arc<ServerConfig>>|
               -> anyhow::Result<Option<Port>> {
            let Some(address) = address else { return Ok(None) };
            Ok(Some(Port::bind(address, tls.filter(|_| !address.ip().is_loopback())).await?))
        };
        let (of_api, of_console) = configs.unzip();
        let (api, console) = (bind(api, of_api).await?, bind(console, of_console).await?);
        reachable.api = api.as_ref().map(url).transpose()?;
        reachable.console = console.as_ref().map(url).transpose()?.map(|url| url + "/");
        Ok(Self { api, console, reachable })
    }
}

/// Accepts every certificate whose key the client has. A client certificate alone gives no permission: a token decides that.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl AnyCertificate {
    fn verifier() -> Arc<dyn ClientCertVerifier> {
        Arc::new(Self(Arc::new(crypto::aws_lc_rs::default_provider())))
    }
}

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The URL of a port. If it listens on all addresses, the URL has the host's name.
fn url(port: &Port) -> anyhow::Result<String> {
    let address = port.address().context("cannot read the address of a TCP port")?;
    let scheme = if port.is_encrypted() { "https" } else { "http" };
    if address.ip().is_unspecified() {
        return Ok(format!("{scheme}://{}:{}", host_name(), address.port()));
    }
    Ok(format!("{scheme}://{address}"))
}

/// The name of this host, or `localhost` if that is not a plain name.
pub fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    if !name.is_empty() && name.chars().all(is_plain) { name } else { "localhost".to_owned() }
}

/// The certificate of the data directory, which is created if missing. The caller holds the directory's lock.
fn own_files(data_dir: &DataDir) -> anyhow::Result<TlsFiles> {
    let dir = data_dir.tls();
    let files = TlsFiles { certificate: dir.join("cert.pem"), key: dir.join("key.pem") };
    let exists = |path: &Path| path.try_exists().with_context(|| format!("cannot read {}", path.display()));
    // The certificate is written last: if it exists, the pair is complete.
    if exists(&files.certificate)? {
        return Ok(files);
    }
    let failed = || format!("cannot make a certificate in {}", dir.display());
    let key = KeyPair::generate().with_context(failed)?;
    let certificate = parameters()?.self_signed(&key).with_context(failed)?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).with_context(failed)?;
    replace(&files.key, key.serialize_pem().as_bytes(), 0o600).with_context(failed)?;
    replace(&files.certificate, certificate.pem().as_bytes(), 0o600).with_context(failed)?;
    Ok(files)
}

fn parameters() -> anyhow::Result<CertificateParams> {
    let host = host_name();
    let mut names = vec![host.clone(), "localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    names.dedup();
    let mut parameters = CertificateParams::new(names).context("cannot name this host in a certificate")?;
    parameters.distinguished_name.push(DnType::CommonName, format!("Headwater on {host}"));
    // Clients compare the fingerprint, so the certificate need not expire while the host exists.
    (parameters.not_before, parameters.not_after) = (date_time_ymd(2025, 1, 1), date_time_ymd(2075, 1, 1));
    Ok(parameters)
}

/// The fingerprint of a certificate in PEM.
fn fingerprint_of(path: &Path) -> anyhow::Result<String> {
    let pem = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let certificate = CertificateDer::from_pem_slice(&pem).map_err(|error| {
        let message = format!("{} does not contain a certificate in PEM: {error}", path.display());
        Problem::new(ProblemKind::Damaged, message).advise(
            "remove the file, and the daemon makes another certificate; clients must then log in again with the new fingerprint",
        )
    })?;
    Ok(fingerprint(&certificate))
}

/// The fingerprint of a certificate, which browsers show too.
pub fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    let hash = digest(&SHA256, certificate);
    let digits: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{FINGERPRINT_PREFIX}{digits}")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn a_certificate_is_made_once_and_only_for_addresses_that_others_reach() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::locate(Some(dir.path().to_owned())).unwrap();
        let loopback = Some("127.0.0.1:0".parse().unwrap());
        let ports = Ports::bind(loopback, loopback, None, &data_dir).await.unwrap();
        assert!(ports.reachable.api.unwrap().starts_with("http://127.0.0.1:"));
        assert_eq!((ports.reachable.fingerprint, data_dir.tls().exists()), (None, false));
        let everywhere = Some("0.0.0.0:0".parse().unwrap());
        let first = Ports::bind(everywhere, loopback, None, &data_dir).await.unwrap().reachable;
        let second = Ports::bind(None, everywhere, None, &data_dir).await.unwrap().reachable;
        let fingerprint = first.fingerprint.unwrap();
        assert_eq!(second.fingerprint.as_ref(), Some(&fingerprint));
        assert_eq!(fingerprint.len(), FINGERPRINT_PREFIX.len() + 64);
        assert!(first.api.unwrap().starts_with("https://") && first.console.unwrap().starts_with("http://"));
        assert!(second.console.unwrap().starts_with("https://"));
        let mode = std::fs::metadata(data_dir.tls().join("key.pem")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(data_dir.tls().join("cert.pem"), "nothing").unwrap();
        let error = Ports::bind(everywhere, None, None, &data_dir).await.err().unwrap();
        assert!(error.to_string().contains("does not contain a certificate"), "{error}");
    }
}
