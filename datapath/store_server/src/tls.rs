//! Certificate and key of the server.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::ServeError;
use crate::server::TlsFiles;

/// TLS 1.3 and 1.2 with ALPN for both versions of HTTP.
pub(crate) fn config(files: &TlsFiles) -> Result<Arc<ServerConfig>, ServeError> {
    let failed = |file: &Path, why: String| ServeError::Tls { file: file.to_owned(), why };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&files.certificate)
        .and_then(Iterator::collect)
        .map_err(|e| failed(&files.certificate, e.to_string()))?;
    if chain.is_empty() {
        return Err(failed(&files.certificate, "it holds no certificate in PEM".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|e| failed(&files.key, e.to_string()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| failed(&files.certificate, e.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|e| {
            failed(&files.key, format!("{e}; it must be the key of {}", files.certificate.display()))
        })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
