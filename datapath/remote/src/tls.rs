//! TLS client settings: which certificate authorities are trusted, and what a refused certificate means.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use headwater_block::small_file;
use headwater_store::{StoreError, StoreErrorKind};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CertificateError, ClientConfig, RootCertStore};

/// A client's settings. If `ca_file` (PEM) is given, only its certificates are trusted, otherwise the
/// system's.
pub(crate) fn client_config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, StoreError> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(file) => add_file(&mut roots, file)?,
        None => {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                return Err(StoreError::new(
                    StoreErrorKind::Invalid,
                    "this system trusts no certificate authority, so no https server can be verified: give the \
                     authority's certificate with --ca, or install ca-certificates",
                ));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| StoreError::new(StoreErrorKind::Io, format!("cannot set up TLS: {e}")))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Explains why a certificate was refused. For certificates made by common recipes, rustls has no message, or
/// none that says what to do.
pub(crate) fn in_words(error: &rustls::Error) -> String {
    let rustls::Error::InvalidCertificate(refused) = error else { return error.to_string() };
    match refused {
        // `BadSignature` occurs if an authority with the same name and another key is trusted.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "no trusted authority has signed its certificate: give the certificate of its \
                                            authority (or its own, if it is self-signed) with --ca FILE"
                .to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => format!(
            "{error}; a server's certificate needs its name or address as a subjectAltName (DNS:NAME or IP:ADDRESS), a common \
             name (CN) does not count"
        ),
        CertificateError::Other(why) => match why.to_string().as_str() {
            "CaUsedAsEndEntity" => {
                "its certificate is that of an authority (CA:TRUE), which cannot be a server's: make \
                                    one with CA:FALSE"
                    .to_owned()
            }
            "UnsupportedCertVersion" => {
                "its certificate is of X.509 version 1: make one of version 3, with its name or \
                                         address as a subjectAltName"
                    .to_owned()
            }
            why => format!("its certificate cannot be used: {why}"),
        },
        _ => error.to_string(),
    }
}

fn add_file(roots: &mut RootCertStore, file: &Path) -> Result<(), StoreError> {
    let refused = |why: String| {
        let what = format!("cannot use the certificates of {}: {why}", file.display());
        StoreError::new(StoreErrorKind::Invalid, what)
    };
    let pem = small_file::read(file, small_file::PEM_MAX_BYTES).map_err(|e| match e.kind() {
        ErrorKind::InvalidData => refused(e.to_string()),
        _ => StoreError::from_os(format!("cannot read the certificates of {}", file.display()), e),
    })?;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|e| refused(e.to_string()))?;
        roots.add(certificate).map_err(|e| refused(e.to_string()))?;
    }
    if roots.is_empty() {
        return Err(refused("there is none in it; a PEM file with BEGIN CERTIFICATE is needed".into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_certificate_is_explained_with_advice() {
        let said = |why: CertificateError| in_words(&rustls::Error::InvalidCertificate(why));
        let other = |why: &str| {
            let why: Arc<dyn std::error::Error + Send + Sync> =
                Arc::new(std::io::Error::other(why.to_owned()));
            CertificateError::Other(rustls::OtherError(why))
        };
        assert!(said(CertificateError::UnknownIssuer).contains("--ca FILE"));
        assert!(said(CertificateError::NotValidForName).contains("subjectAltName"));
        // Made by 'openssl x509 -req' without extensions.
        assert!(said(other("UnsupportedCertVersion")).contains("version 3"));
        assert_eq!(said(other("odd")), "its certificate cannot be used: odd");
        assert!(said(CertificateError::Expired).contains("Expired"));
    }

    #[test]
    fn a_file_without_certificates_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.pem");
        let error = client_config(Some(&file)).unwrap_err().to_string();
        assert!(error.contains("ca.pem"), "{error}");
        std::fs::write(&file, "hello").unwrap();
        let error = client_config(Some(&file)).unwrap_err().to_string();
        assert!(error.contains("BEGIN CERTIFICATE"), "{error}");
        std::fs::write(&file, "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n").unwrap();
        assert!(client_config(Some(&file)).is_err());
    }
}
