//! The certificate authority of a fleet, and the certificate of its controller.

use anyhow::Context;
use aws_lc_rs::digest::{SHA256, digest};
use headwater_api::{Problem, ProblemKind};
use headwater_db::{AuthorityRecord, Database};
use headwater_service::fleet::controller::{self, Issued};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, date_time_ymd,
};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::daemon::network::fingerprint;
use crate::fleet::CONTROLLER_NAME;

/// The length of a public key on the curve P-256, uncompressed.
const PUBLIC_KEY_BYTES: usize = 65;

/// A certificate authority with its key.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    pem: String,
    url: String,
}

/// The certificate chain of a controller, with its key.
pub struct ControllerCertificate {
    /// The certificate of the controller, and that of the authority.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key of the controller's certificate.
    pub key: PrivateKeyDer<'static>,
}

impl Authority {
    /// Reads the authority from the database, or creates it. `url` is the URL at which nodes reach the controller.
    pub async fn load_or_make(database: &dyn Database, url: String) -> anyhow::Result<Self> {
        let failed = "cannot read the authority for nodes from the database";
        let mut unit = database.write().await.context(failed)?;
        let known = unit.hosts().authority().await.context(failed)?;
        let record = match known {
            Some(record) => record,
            None => {
                let made = new_authority().context("cannot make an authority for nodes")?;
                let failed = "cannot write the authority for nodes to the database";
                unit.hosts().add_authority(&made).await.context(failed)?;
                unit.save().await.context(failed)?;
                made
            }
        };
        Self::from_record(&record, url)
    }

    fn from_record(record: &AuthorityRecord, url: String) -> anyhow::Result<Self> {
        let pem = record.certificate.clone();
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes());
        let certificate = certificate.map_err(|error| damaged("certificate", &error.to_string()))?;
        let key = KeyPair::from_pem(&record.key).map_err(|error| damaged("key", &error.to_string()))?;
        let issuer = Issuer::new(parameters_of_authority(), key);
        Ok(Self { issuer, certificate, pem, url })
    }

    /// Issues a certificate for the port of this controller. It is valid as long as the process runs.
    pub fn certificate_of_controller(&self) -> anyhow::Result<ControllerCertificate> {
        let failed = "cannot make the certificate of the port for nodes";
        let mut parameters = CertificateParams::new(vec![CONTROLLER_NAME.to_owned()]).context(failed)?;
        parameters.distinguished_name.push(DnType::CommonName, "Headwater controller");
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        last_long(&mut parameters);
        let key = KeyPair::generate().context(failed)?;
        let certificate = parameters.signed_by(&key, &self.issuer).context(failed)?;
        let chain = vec![certificate.der().clone(), self.certificate.clone()];
        let key = PrivateKeyDer::try_from(key.serialize_der());
        Ok(ControllerCertificate { chain, key: key.map_err(|error| anyhow::anyhow!("{failed}: {error}"))? })
    }

    /// The identity of all controllers of this authority: the first 16 bytes of the hash of its certificate.
    pub fn identity(&self) -> String {
        hash_of(&self.certificate).chars().take(32).collect()
    }

    /// Its certificate.
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.certificate
    }
}

impl controller::Authority for Authority {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn fingerprint(&self) -> String {
        hash_of(&self.certificate)
    }

    fn certificate(&self) -> String {
        self.pem.clone()
    }

    fn issue(&self, host: &str, public_key: &str) -> Result<Issued, String> {
        let key = PublicKey::parse(public_key)?;
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, format!("Headwater node {host}"));
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        last_long(&mut parameters);
        let certificate = parameters.signed_by(&key, &self.issuer).map_err(|error| error.to_string())?;
        Ok(Issued { certificate: certificate.pem(), fingerprint: fingerprint(certificate.der()) })
    }
}

/// The SHA-256 of a certificate, in hexadecimal digits.
pub fn hash_of(certificate: &CertificateDer<'_>) -> String {
    digest(&SHA256, certificate).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The public key of a node. Only the node has the private key.
struct PublicKey(Vec<u8>);

impl PublicKey {
    fn parse(digits: &str) -> Result<Self, String> {
        let odd = || "its public key is not on the curve P-256".to_owned();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Option<Vec<u8>> = digits.as_bytes().chunks(2).map(byte).collect();
        let bytes = bytes.filter(|bytes| bytes.len() == PUBLIC_KEY_BYTES).ok_or_else(odd)?;
        Ok(Self(bytes))
    }
}

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// Certificates are accepted as long as the database has their host. They never expire, so that a wrong clock locks
/// no node out.
fn last_long(parameters: &mut CertificateParams) {
    (parameters.not_before, parameters.not_after) = (date_time_ymd(1970, 1, 1), date_time_ymd(2075, 1, 1));
}

fn parameters_of_authority() -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, "Headwater fleet");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    last_long(&mut parameters);
    parameters
}

fn new_authority() -> Result<AuthorityRecord, rcgen::Error> {
    let key = KeyPair::generate()?;
    let certificate = parameters_of_authority().self_signed(&key)?;
    Ok(AuthorityRecord { key: key.serialize_pem(), certificate: certificate.pem() })
}

fn damaged(what: &str, why: &str) -> anyhow::Error {
    let message = format!("the {what} of the authority for nodes in the database cannot be used: {why}");
    Problem::new(ProblemKind::Damaged, message)
        .advise("restore the database from a backup; without it, all nodes have to join again")
        .into()
}

#[cfg(test)]
mod tests {
    use headwater_db::sqlite::SqliteDatabase;
    use headwater_db::{SECRETS_KEY_BYTES, Secrets as _, SecretsKey};
    use headwater_service::fleet::controller::Authority as _;

    use super::*;

    #[tokio::test]
    async fn an_authority_stays_the_same_and_signs_public_keys() {
        let dir = tempfile::tempdir().unwrap();
        let database = SqliteDatabase::open(&dir.path().join("headwater.db")).await.unwrap();
        database.unlock(SecretsKey::new(&[7; SECRETS_KEY_BYTES]).unwrap()).await.unwrap();
        let make = async || Authority::load_or_make(&database, "https://a:1".to_owned()).await.unwrap();
        let (first, second) = (make().await, make().await);
        assert_eq!(first.fingerprint(), second.fingerprint());
        assert_eq!(first.fingerprint().len(), 64);
        let key = KeyPair::generate().unwrap();
        let digits: String = key.public_key_raw().iter().map(|byte| format!("{byte:02x}")).collect();
        let issued = second.issue("node-1", &digits).unwrap();
        assert!(
            issued.certificate.contains("BEGIN CERTIFICATE") && issued.fingerprint.starts_with("sha256:")
        );
        for odd in ["", "04", &digits[2..], &"zz".repeat(PUBLIC_KEY_BYTES)] {
            assert!(first.issue("node-1", odd).is_err(), "{odd}");
        }
        let record = new_authority().unwrap();
        let odd = AuthorityRecord { key: "nothing".to_owned(), ..record };
        let error = Authority::from_record(&odd, String::new()).err().unwrap().to_string();
        assert!(
            error.contains("the key of the authority for nodes in the database cannot be used"),
            "{error}"
        );
    }
}
