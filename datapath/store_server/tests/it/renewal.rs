//! Certificate and key that are replaced while the server runs.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use headwater_store::{Access, LocalDir, Store};
use headwater_store_server::{Limits, Options, StoreServer, TlsFiles};
use tokio::sync::watch;

#[test]
fn a_renewed_certificate_is_used_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let files = TlsFiles { certificate: dir.path().join("cert.pem"), key: dir.path().join("key.pem") };
    let renew = || {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        std::fs::write(&files.certificate, made.cert.pem()).unwrap();
        std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
        made.cert.der().clone()
    };
    let first = renew();
    let store: Arc<dyn Store> = Arc::new(LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (_stop, stopped) = watch::channel(false);
    let listen = "127.0.0.1:0".parse().unwrap();
    let tls = Some(files.clone());
    let options = Options { listen, tls, token_file: None, limits: Limits::default() };
    let server = runtime.block_on(StoreServer::bind(store, &options)).unwrap();
    let address = server.address();
    runtime.spawn(server.run(stopped));

    // Whether a client that trusts this certificate alone can connect.
    let is_shown = |certificate: &rustls::pki_types::CertificateDer<'static>| {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut client =
            rustls::ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        while client.is_handshaking() {
            if client.complete_io(&mut stream).is_err() {
                return false;
            }
        }
        true
    };
    assert!(is_shown(&first));
    let second = renew();
    headwater_testkit::wait_until("the new certificate is used", || is_shown(&second));
    assert!(!is_shown(&first));
}
