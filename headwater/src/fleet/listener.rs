//! The controller's TCP port for nodes: TLS, and limits on connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use headwater_db::Database;
use headwater_service::Service;
use headwater_service::fleet::controller::{Authority as _, NodePeer};
use headwater_service::server::{ListenError, keep_alive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::daemon::network::{fingerprint, host_name};
use crate::fleet::authority::Authority;
use crate::fleet::{ALPN, provider};

/// The most connected nodes.
const NODES_MAX: usize = 4096;

/// The most concurrent connections without a certificate of the fleet: unauthenticated clients, and hosts that join.
const UNAUTHENTICATED_MAX: usize = 64;

/// Timeout of a handshake, and of a whole connection without a certificate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);

/// The pause after accepting a connection failed, which happens if there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A port that is bound but not served yet.
pub struct BoundPort {
    listener: TcpListener,
    url: String,
}

impl BoundPort {
    /// Binds the port.
    pub async fn bind(address: SocketAddr) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Failed { what: address.to_string(), source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let url = match bound.ip().is_unspecified() {
            true => format!("https://{}:{}", host_name(), bound.port()),
            false => format!("https://{bound}"),
        };
        Ok(Self { listener, url })
    }

    /// Reads the authority from the database, or creates it.
    pub async fn with_authority(self, database: &dyn Database) -> anyhow::Result<NodePort> {
        let Self { listener, url } = self;
        let authority = Arc::new(Authority::load_or_make(database, url).await?);
        let tls = TlsAcceptor::from(config(&authority).context("cannot serve nodes")?);
        Ok(NodePort { listener, tls, authority })
    }
}

/// A port that can serve nodes.
pub struct NodePort {
    listener: TcpListener,
    tls: TlsAcceptor,
    authority: Arc<Authority>,
}

impl NodePort {
    /// The URL at which nodes reach it.
    pub fn url(&self) -> String {
        self.authority.url()
    }

    /// Serves the port until `stop` is true.
    pub async fn serve(self, service: Service, mut stop: watch::Receiver<bool>) -> std::io::Result<()> {
        service.accept_nodes(self.authority);
        let places = Places {
            unauthenticated: Arc::new(Semaphore::new(UNAUTHENTICATED_MAX)),
            nodes: Arc::new(Semaphore::new(NODES_MAX)),
        };
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let accepted = tokio::select! {
                () = stopped(&mut stop) => break,
                accepted = self.listener.accept() => accepted,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection of a node");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(place) = places.unauthenticated.clone().try_acquire_owned() else {
                tracing::debug!(%address, "refused a connection, because {UNAUTHENTICATED_MAX} connections without a certificate are open");
                continue;
            };
            let (service, tls, stop) = (service.clone(), self.tls.clone(), stop.clone());
            let nodes = places.nodes.clone();
            connections
                .spawn(async move { serve_one(stream, address, tls, (place, nodes), service, stop).await });
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

/// The limits on connections.
struct Places {
    unauthenticated: Arc<Semaphore>,
    nodes: Arc<Semaphore>,
}

/// Serves a connection. It counts as unauthenticated until it has a valid certificate.
async fn serve_one(
    stream: TcpStream,
    address: SocketAddr,
    tls: TlsAcceptor,
    (place, nodes): (OwnedSemaphorePermit, Arc<Semaphore>),
    service: Service,
    mut stop: watch::Receiver<bool>,
) {
    let _ = stream.set_nodelay(true);
    let _ = keep_alive(&stream);
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)) => accepted,
        () = stopped(&mut stop) => return,
    };
    match accepted {
        Ok(Ok(stream)) => {
            let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
            let peer = NodePeer { fingerprint: shown.map(fingerprint), address: address.to_string() };
            if peer.fingerprint.is_none() {
                let _place = place;
                let served = service.serve_node(stream, peer, stop);
                if tokio::time::timeout(HANDSHAKE_TIMEOUT, served).await.is_err() {
                    tracing::debug!(%address, "a connection without a certificate took too long");
                }
                return;
            }
            drop(place);
            let Ok(_place) = nodes.try_acquire_owned() else {
                tracing::warn!(%address, "refused a node, because {NODES_MAX} nodes are connected");
                return;
            };
            service.serve_node(stream, peer, stop).await;
        }
        Ok(Err(error)) => tracing::debug!(%address, "a TLS handshake at the port for nodes failed: {error}"),
        Err(_) => tracing::debug!(%address, "a TLS handshake at the port for nodes took too long"),
    }
}

fn config(authority: &Authority) -> anyhow::Result<Arc<ServerConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone())?;
    // Optional, because a host that joins has no certificate yet.
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
        .allow_unauthenticated()
        .build()?;
    let own = authority.certificate_of_controller()?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(own.chain, own.key)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// Waits until the daemon ends.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}
