//! Keeps a node connected to its controller: TLS with certificates of both sides, with retries.

use std::sync::Arc;
use std::time::Duration;

use headwater_api::{Problem, ProblemKind};
use headwater_service::Service;
use headwater_service::server::keep_alive;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{CertificateError, ClientConfig, Error, RootCertStore};

use crate::client::server::Address;
use crate::fleet::membership::Joined;
use crate::fleet::{ALPN, CONTROLLER_NAME, DEFAULT_PORT, provider};

/// Timeout of a connection and of its handshake. Several controllers are tried one after the other, and the node's
/// lease continues to run out meanwhile.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// The first pause between attempts, and the longest. Each pause is twice as long as the one before.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// The longest pause of a node that was refused, because somebody must change something first.
const PAUSE_REFUSED: Duration = Duration::from_secs(60);

/// Parses the URL of a controller.
pub fn address(url: &str) -> anyhow::Result<Address> {
    // The default port differs from that of the API.
    let has_port = url.parse::<hyper::Uri>().is_ok_and(|uri| uri.port().is_some());
    let mut address = Address::parse(url)?;
    if !address.is_encrypted {
        return Err(crate::failure::invalid(format!("'{url}' is not https://HOST:PORT")));
    }
    if !has_port {
        address.port = DEFAULT_PORT;
    }
    Ok(address)
}

/// Keeps a daemon connected to its controller until `stop` is true.
pub async fn keep_connected(
    service: Service,
    joined: Joined,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let mut pause = PAUSE_FIRST;
    let mut logged = None;
    loop {
        let mut longest = PAUSE_MAX;
        let connected = tokio::select! {
            connected = connect_once(&service, &joined, stop.clone()) => connected,
            () = stopped(&mut stop) => return Ok(()),
        };
        match connected {
            Ok(()) => {
                pause = PAUSE_FIRST;
                logged = None;
            }
            Err(problem) => {
                if matches!(problem.kind, ProblemKind::Unauthorized | ProblemKind::Conflict) {
                    longest = PAUSE_REFUSED;
                }
                let text = problem.to_string();
                // A problem that repeats is logged once.
                if logged.as_ref() != Some(&text) {
                    tracing::warn!(
                        controller = joined.fleet.controllers(),
                        "cannot connect to the controller; it is tried again: {text}"
                    );
                    logged = Some(text);
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stopped(&mut stop) => return Ok(()),
        }
        pause = (pause * 2).min(longest);
    }
}

async fn connect_once(
    service: &Service,
    joined: &Joined,
    stop: watch::Receiver<bool>,
) -> Result<(), Problem> {
    let config = config(joined)?;
    let invalid = |error| Problem::new(ProblemKind::Invalid, format!("{error:#}"));
    let addresses = joined.fleet.controllers.iter().map(|url| address(url));
    let addresses = addresses.collect::<anyhow::Result<Vec<_>>>().map_err(invalid)?;
    let mut problems = Vec::new();
    for address in &addresses {
        let served = match connect(address, Arc::clone(&config)).await {
            Ok(stream) => service.serve_controller(stream, stop.clone()).await,
            Err(problem) => Err(problem),
        };
        match served {
            Ok(()) => return Ok(()),
            // With TLS 1.3 the server refuses the certificate after the handshake of this side.
            Err(problem) if problem.message.contains("fatal alert") => {
                problems.push(not_accepted(&address.url(), &problem.message));
            }
            // A controller without the database refuses; the next one may have it.
            Err(problem) => problems.push(problem),
        }
    }
    Err(worst(problems))
}

/// The most specific problem: a refusal says more than an unreachable server.
fn worst(mut problems: Vec<Problem>) -> Problem {
    let first = problems.iter().position(|problem| problem.kind != ProblemKind::Unavailable).unwrap_or(0);
    match problems.is_empty() {
        true => Problem::new(ProblemKind::Invalid, "this host has no URL of a controller"),
        false => problems.swap_remove(first),
    }
}

/// Connects to the first address at which a controller answers. A controller on standby does not.
pub async fn connect_any(
    addresses: &[Address],
    config: &Arc<ClientConfig>,
) -> Result<TlsStream<TcpStream>, Problem> {
    let mut problems: Vec<Problem> = Vec::new();
    for address in addresses {
        match connect(address, Arc::clone(config)).await {
            Ok(stream) => return Ok(stream),
            Err(problem) => problems.push(problem),
        }
    }
    Err(worst(problems))
}

/// Connects, including the TLS handshake.
async fn connect(address: &Address, config: Arc<ClientConfig>) -> Result<TlsStream<TcpStream>, Problem> {
    let url = address.url();
    let unreachable = |why: String| {
        let message = format!("cannot reach the controller at {url}: {why}");
        Problem::new(ProblemKind::Unavailable, message).advise(
            "check whether 'headwater serve --nodes' runs there, and whether a firewall is in between",
        )
    };
    let connecting = async {
        let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
        let _ = stream.set_nodelay(true);
        let _ = keep_alive(&stream);
        let name = ServerName::try_from(CONTROLLER_NAME).map_err(std::io::Error::other)?;
        TlsConnector::from(config).connect(name, stream).await
    };
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
    let connected =
        connected.map_err(|_| unreachable(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs())))?;
    connected.map_err(|error| match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(tls) => explain(tls, &url),
        None if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            unreachable("nothing listens at this address".to_owned())
        }
        None => unreachable(error.to_string()),
    })
}

fn not_accepted(url: &str, why: &str) -> Problem {
    let message = format!("{url} does not accept the certificate of this node: {why}");
    Problem::new(ProblemKind::Unauthorized, message).advise(
        "check whether that is the controller that this host joined; if it is, remove the directory 'node' of the data directory, and join again",
    )
}

/// Translates the error of a handshake.
fn explain(error: &Error, url: &str) -> Problem {
    let problem = |message: String| Problem::new(ProblemKind::Unauthorized, message);
    match error {
        Error::InvalidCertificate(
            CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. }
            | CertificateError::Expired
            | CertificateError::ExpiredContext { .. },
        ) => problem(format!("the certificate of {url} is not valid at the present time of this host's clock"))
            .advise("set the clock of this host"),
        Error::InvalidCertificate(_) => {
            problem(format!("the server at {url} is not the controller of this fleet"))
                .advise("check the URL; a controller with a new database has another authority, and its nodes have to join again")
        }
        Error::AlertReceived(_) => not_accepted(url, &error.to_string()),
        _ => problem(format!("cannot speak TLS with {url}: {error}"))
            .advise("check whether this is the port of 'serve --nodes'"),
    }
}

fn config(joined: &Joined) -> Result<Arc<ClientConfig>, Problem> {
    let damaged = |what: &str, why: String| {
        let message =
            format!("the {what} in the directory 'node' of the data directory cannot be used: {why}");
        Problem::new(ProblemKind::Damaged, message)
            .advise("restore it, or remove that directory and join again with 'headwater node join'")
    };
    let authority = CertificateDer::from_pem_slice(joined.authority.as_bytes())
        .map_err(|error| damaged("authority", error.to_string()))?;
    let certificate = CertificateDer::from_pem_slice(joined.certificate.as_bytes())
        .map_err(|error| damaged("certificate", error.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(joined.key.as_bytes())
        .map_err(|error| damaged("key", error.to_string()))?;
    let verifier = verifier_of(&authority).map_err(|why| damaged("authority", why))?;
    let config = client_config(verifier)?.with_client_auth_cert(vec![certificate], key);
    let mut config = config.map_err(|error| damaged("certificate", error.to_string()))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// A verifier that trusts certificates which an authority has signed.
pub fn verifier_of(authority: &CertificateDer<'static>) -> Result<Arc<WebPkiServerVerifier>, String> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone()).map_err(|error| error.to_string())?;
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider());
    verifier.build().map_err(|error| error.to_string())
}

type Unfinished =
    tokio_rustls::rustls::ConfigBuilder<ClientConfig, tokio_rustls::rustls::client::WantsClientCert>;

/// The first part of a configuration with a verifier.
pub fn client_config(verifier: Arc<dyn ServerCertVerifier>) -> Result<Unfinished, Problem> {
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder =
        builder.map_err(|error| Problem::new(ProblemKind::Failed, format!("cannot speak TLS: {error}")))?;
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier))
}

/// Waits until the daemon ends.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}
