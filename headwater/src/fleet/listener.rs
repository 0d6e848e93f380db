//! The controller's port for nodes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use headwater_service::Service;
use headwater_service::fleet::controller::{Authority as _, NodePeer};
use headwater_service::server::{ListenError, keep_alive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use crate::daemon::network::{fingerprint, host_name};
use crate::data_dir::DataDir;
use crate::fleet::authority::Authority;
use crate::fleet::{ALPN, provider};

/// The most connections at a time: nodes, and those that have not shown yet that they are one.
const CONNECTIONS_MAX: usize = 4096;

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);

/// The pause after a connection could not be accepted: there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A port that is bound.
pub struct NodePort {
    listener: TcpListener,
    tls: TlsAcceptor,
    authority: Arc<Authority>,
}

impl NodePort {
    /// Binds it. The authority is made the first time.
    pub async fn bind(address: SocketAddr, data_dir: &DataDir) -> anyhow::Result<Self> {
        let failed = |source| ListenError::Failed { what: address.to_string(), source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let url = match bound.ip().is_unspecified() {
            true => format!("https://{}:{}", host_name(), bound.port()),
            false => format!("https://{bound}"),
        };
        let authority = Arc::new(Authority::load_or_make(&data_dir.fleet(), url)?);
        let tls = TlsAcceptor::from(config(&authority).context("cannot serve nodes")?);
        Ok(Self { listener, tls, authority })
    }

    /// Where nodes reach it.
    pub fn url(&self) -> String {
        self.authority.url()
    }

    /// Serves it until `stop` says true.
    pub async fn serve(self, service: Service, mut stop: watch::Receiver<bool>) -> std::io::Result<()> {
        service.has_nodes(self.authority);
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
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
            let Ok(place) = places.clone().try_acquire_owned() else {
                tracing::warn!(%address, "there are {CONNECTIONS_MAX} connections of nodes, and one more is refused");
                continue;
            };
            let (service, tls, stop) = (service.clone(), self.tls.clone(), stop.clone());
            connections.spawn(async move {
                let _place = place;
                serve_one(stream, address, tls, service, stop).await;
            });
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

async fn serve_one(
    stream: TcpStream,
    address: SocketAddr,
    tls: TlsAcceptor,
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
            service.serve_node(stream, peer, stop).await;
        }
        Ok(Err(error)) => tracing::warn!(%address, "a TLS handshake at the port for nodes failed: {error}"),
        Err(_) => tracing::debug!(%address, "a TLS handshake at the port for nodes took too long"),
    }
}

fn config(authority: &Authority) -> anyhow::Result<Arc<ServerConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone())?;
    // A host that joins has no certificate yet.
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
    // An error means that the sender is gone, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}
