//! The address of a server on another host, and the TLS checks that it is the right one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_service::server::keep_alive;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use crate::daemon::network::{FINGERPRINT_PREFIX, fingerprint};
use crate::failure::{Unreachable, invalid};

/// The port if a URL names none.
pub const DEFAULT_PORT: u16 = 9470;

/// Timeout of a connection, and of its TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// Host and port of a server's API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Its name or address, without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whether the server uses TLS.
    pub is_encrypted: bool,
}

impl Address {
    /// Parses `https://HOST[:PORT]`. Plain HTTP is permitted for loopback addresses, for instance a forwarded port.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let odd =
            || invalid(format!("'{text}' is not https://HOST:PORT, such as https://lab1:{DEFAULT_PORT}"));
        let uri: hyper::Uri = text.parse().map_err(|_| odd())?;
        let is_encrypted = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(odd()),
        };
        let is_root = uri.path_and_query().is_none_or(|path| path.as_str() == "/");
        let authority = uri.authority().filter(|it| is_root && !it.as_str().contains('@')).ok_or_else(odd)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        if !is_encrypted && !matches!(host.as_str(), "localhost" | "127.0.0.1" | "::1") {
            return Err(invalid(format!(
                "'{text}' is not encrypted, so others could read the token: use https"
            )));
        }
        let port = match authority.as_str().strip_prefix(authority.host()).unwrap_or_default() {
            "" => DEFAULT_PORT,
            // A port that is out of range is an error, not the default.
            _ => authority.port_u16().filter(|port| *port != 0).ok_or_else(odd)?,
        };
        if is_encrypted && ServerName::try_from(host.clone()).is_err() {
            return Err(odd());
        }
        Ok(Self { host, port, is_encrypted })
    }

    /// Host and port, for the request's authority.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("{host}:{}", self.port)
    }

    /// The URL, which [`Address::parse`] accepts.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.is_encrypted { "https" } else { "http" }, self.authority())
    }
}

/// How a client recognises the right server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// By the fingerprint of its certificate.
    Fingerprint(String),
    /// By a certificate for its name that one of these authorities (in PEM) has signed. `None`: the system's
    /// authorities.
    Authorities(Option<String>),
}

/// Checks the text of a fingerprint.
pub fn parse_fingerprint(text: &str) -> Result<String, String> {
    let text = text.to_ascii_lowercase();
    let digits: String =
        text.strip_prefix(FINGERPRINT_PREFIX).unwrap_or(&text).chars().filter(|c| *c != ':').collect();
    if digits.len() == 64 && digits.bytes().all(|c| c.is_ascii_hexdigit()) {
        return Ok(format!("{FINGERPRINT_PREFIX}{digits}"));
    }
    Err(format!(
        "it is not {FINGERPRINT_PREFIX} and 64 hexadecimal digits, as 'headwater status' on the server shows it"
    ))
}

/// The files of the client's own certificate, in PEM. They are read at each connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientFiles {
    /// The certificate, and those of authorities below its root.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl ClientFiles {
    fn read(&self) -> anyhow::Result<Pair> {
        let odd = |path: &Path, what: &str, error: pem::Error| match error {
            pem::Error::Io(error) => {
                anyhow::Error::new(error).context(format!("cannot read {}", path.display()))
            }
            error => invalid(format!("{} does not contain {what} in PEM: {error}", path.display())),
        };
        let chain = CertificateDer::pem_file_iter(&self.certificate);
        let chain = chain.and_then(|chain| chain.collect::<Result<Vec<_>, _>>());
        let chain = chain.map_err(|error| odd(&self.certificate, "a certificate", error))?;
        if chain.is_empty() {
            return Err(invalid(format!(
                "{} does not contain a certificate in PEM",
                self.certificate.display()
            )));
        }
        let key = PrivateKeyDer::from_pem_file(&self.key);
        Ok((chain, key.map_err(|error| odd(&self.key, "a private key", error))?))
    }
}

/// Connects to a server, and verifies that it is the right one. `own` is the client's certificate, if it has one.
pub async fn connect(
    address: &Address,
    trust: &Trust,
    own: Option<&ClientFiles>,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let config = config(verifier(trust)?, own)?;
    handshake(address, config).await.map_err(|error| explain(error, address, trust))
}

/// Connects to a server of the web, whose certificate one of the system's authorities has signed.
pub async fn connect_web(address: &Address) -> anyhow::Result<TlsStream<TcpStream>> {
    let config = config(verifier(&Trust::Authorities(None))?, None)?;
    Ok(handshake(address, config).await?)
}

/// The same without TLS.
pub async fn connect_web_plain(address: &Address) -> anyhow::Result<TcpStream> {
    Ok(reach(address).await?)
}

/// The fingerprint of the certificate of an unverified server. Nothing is sent to it.
pub async fn seen_fingerprint(address: &Address) -> anyhow::Result<String> {
    let seen = Arc::new(Seen { provider: provider(), fingerprint: Mutex::default() });
    let failed = || format!("cannot connect to {}", address.url());
    drop(handshake(address, config(seen.clone(), None)?).await.with_context(failed)?);
    let seen = seen.fingerprint.lock().unwrap_or_else(PoisonError::into_inner).take();
    seen.with_context(|| format!("{} has sent no certificate", address.url()))
}

/// A connection without TLS.
pub async fn connect_plain(address: &Address) -> anyhow::Result<TcpStream> {
    reach(address).await.map_err(|e| unreachable(&e, address))
}

async fn reach(address: &Address) -> std::io::Result<TcpStream> {
    let connecting = TcpStream::connect((address.host.as_str(), address.port));
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.map_err(|_| late())??;
    // Console input is sent without delay, and a dead server is noticed. A failure costs only that.
    let _ = stream.set_nodelay(true);
    let _ = keep_alive(&stream);
    Ok(stream)
}

fn late() -> std::io::Error {
    let why = format!("it does not answer within {} s", CONNECT_TIMEOUT.as_secs());
    std::io::Error::new(std::io::ErrorKind::TimedOut, why)
}

/// The error of a connection that failed.
fn unreachable(error: &std::io::Error, address: &Address) -> anyhow::Error {
    let reason = match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "nothing listens at this address".to_owned(),
        _ => error.to_string(),
    };
    let advice = "check whether the server runs with 'serve --listen', and whether a firewall is in between";
    Unreachable { socket: address.url(), reason, advice }.into()
}

async fn handshake(address: &Address, config: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(address.host.clone()).map_err(std::io::Error::other)?;
    let stream = reach(address).await?;
    let shaking = TlsConnector::from(config).connect(name, stream);
    tokio::time::timeout(CONNECT_TIMEOUT, shaking).await.map_err(|_| late())?
}

/// The error and advice if a server is not, or may not be, the right one.
fn explain(error: std::io::Error, address: &Address, trust: &Trust) -> anyhow::Error {
    let refused = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    let Some(refused) = refused else { return unreachable(&error, address) };
    let url = address.url();
    let problem = |message: String| Problem::new(ProblemKind::Unauthorized, message);
    match (refused, trust) {
        (Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure), Trust::Fingerprint(known)) => {
            problem(format!("the certificate of {url} does not have the fingerprint {known}"))
                .advise("somebody may intercept the connection; if the server was reinstalled, compare with 'headwater status' on it and log in again")
        }
        (
            Error::InvalidCertificate(
                CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. }
                | CertificateError::Expired
                | CertificateError::ExpiredContext { .. },
            ),
            Trust::Authorities(_),
        ) => problem(format!("the certificate of {url} is not valid at the present time of this computer's clock"))
            .advise("set the clock of this computer; if the clock is right, the certificate of the server must be renewed"),
        (Error::InvalidCertificate(why), Trust::Authorities(_)) => problem(format!(
            "the certificate of {url} is not signed by a known authority, or not for this name: {why:?}"
        ))
        .advise("log in with the --fingerprint that 'headwater status' shows on the server, or with --ca and the file of the authority that signed the certificate"),
        _ => problem(format!("cannot speak TLS with {url}: {refused}"))
            .advise("check whether this is the port of 'serve --listen'"),
    }
    .into()
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn config(
    verifier: Arc<dyn ServerCertVerifier>,
    own: Option<&ClientFiles>,
) -> anyhow::Result<Arc<ClientConfig>> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .context("cannot speak TLS")?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let Some(own) = own else { return Ok(Arc::new(config.with_no_client_auth())) };
    let (chain, key) = own.read()?;
    let config = config.with_client_auth_cert(chain, key).map_err(|error| {
        let (certificate, key) = (own.certificate.display(), own.key.display());
        invalid(format!("cannot use the certificate {certificate} with the key {key}: {error}"))
    })?;
    Ok(Arc::new(config))
}

fn verifier(trust: &Trust) -> anyhow::Result<Arc<dyn ServerCertVerifier>> {
    let pem = match trust {
        Trust::Fingerprint(expected) => {
            return Ok(Arc::new(Pinned { provider: provider(), expected: expected.clone() }));
        }
        Trust::Authorities(pem) => pem,
    };
    let mut roots = RootCertStore::empty();
    match pem {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                let certificate = certificate.context("cannot read the certificates of --ca")?;
                roots.add(certificate).context("cannot use a certificate of --ca")?;
            }
        }
        None => {
            // Invalid certificates are skipped, as other programs do.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() && pem.is_some() {
        return Err(invalid("the file of --ca holds no certificate in PEM"));
    }
    if roots.is_empty() {
        let problem = Problem::new(ProblemKind::Invalid, "there are no certificate authorities on this host");
        return Err(problem.advise("log in with --fingerprint or --ca").into());
    }
    let verifier = tokio_rustls::rustls::client::WebPkiServerVerifier::builder_with_provider(
        Arc::new(roots),
        provider(),
    );
    Ok(verifier.build().context("cannot check certificates")?)
}

/// A verifier that accepts one certificate.
#[derive(Debug)]
struct Pinned {
    provider: Arc<CryptoProvider>,
    expected: String,
}

/// A verifier that accepts every certificate, and records its fingerprint.
#[derive(Debug)]
struct Seen {
    provider: Arc<CryptoProvider>,
    fingerprint: Mutex<Option<String>>,
}

impl Pinned {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        if fingerprint(certificate) == self.expected {
            return Ok(());
        }
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }
}

impl Seen {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        *self.fingerprint.lock().unwrap_or_else(PoisonError::into_inner) = Some(fingerprint(certificate));
        Ok(())
    }
}

/// Implements the verifier by a `check` of the certificate. The signatures, which prove that the server has its key, are always verified.
macro_rules! verify_by_check {
    ($type:ty) => {
        impl ServerCertVerifier for $type {
            fn verify_server_cert(
                &self,
                certificate: &CertificateDer<'_>,
                _: &[CertificateDer<'_>],
                _: &ServerName<'_>,
                _: &[u8],
                _: UnixTime,
            ) -> Result<ServerCertVerified, Error> {
                self.check(certificate).map(|()| ServerCertVerified::assertion())
            }

            fn verify_tls12_signature(
                &self,
                message: &[u8],
                certificate: &CertificateDer<'_>,
                signed: &DigitallySignedStruct,
            ) -> Result<HandshakeSignatureValid, Error> {
                let algorithms = &self.provider.signature_verification_algorithms;
                verify_tls12_signature(message, certificate, signed, algorithms)
            }

            fn verify_tls13_signature(
                &self,
                message: &[u8],
                certificate: &CertificateDer<'_>,
                signed: &DigitallySignedStruct,
            ) -> Result<HandshakeSignatureValid, Error> {
                let algorithms = &self.provider.signature_verification_algorithms;
                verify_tls13_signature(message, certificate, signed, algorithms)
            }

            fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
                self.provider.signature_verification_algorithms.supported_schemes()
            }
        }
    };
}

verify_by_check!(Pinned);
verify_by_check!(Seen);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_urls_without_a_path() {
        let address = |text| Address::parse(text).unwrap();
        assert_eq!(address("https://lab1").authority(), "lab1:9470");
        assert_eq!(address("https://lab1:1234/").url(), "https://lab1:1234");
        assert_eq!(address("https://[fe80::1]").url(), "https://[fe80::1]:9470");
        assert_eq!(address("http://127.0.0.1:8080").url(), "http://127.0.0.1:8080");
        for odd in [
            "lab1",
            "lab1:9470",
            "ftp://lab1",
            "https://",
            "https://lab1/x",
            "https://a@lab1",
            "http://lab1",
            "https://lab1:99999",
            "https://lab1:x",
            "https://lab1:0",
        ] {
            assert!(Address::parse(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn fingerprints_may_be_written_as_browsers_do() {
        let plain = "ab".repeat(32);
        let expected = Ok(format!("sha256:{plain}"));
        assert_eq!(parse_fingerprint(&plain), expected);
        assert_eq!(parse_fingerprint(&["AB"; 32].join(":")), expected);
        assert_eq!(parse_fingerprint(&format!("SHA256:{plain}")), expected);
        for odd in ["", "sha256:", &plain[1..], &"xy".repeat(32)] {
            assert!(parse_fingerprint(odd).is_err(), "{odd}");
        }
    }
}
