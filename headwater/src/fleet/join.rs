//! Joins a fleet: exchanges a token for a certificate.

use std::sync::Arc;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_db::Database;
use headwater_db::sqlite::SqliteDatabase;
use headwater_service::fleet::OwnHost;
use headwater_service::fleet::controller::ParsedJoinToken;
use headwater_service::fleet::protocol::{
    FromNode, Join, PROTOCOL, ToNode, read_line, wait_until_ready, write_line,
};
use rcgen::KeyPair;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};

use crate::client::server::Address;
use crate::data_dir::DataDir;
use crate::fleet::authority::hash_of;
use crate::fleet::connect::{address, client_config, connect_any, verifier_of};
use crate::fleet::membership::{self, Fleet, Joined};
use crate::fleet::{ALPN, provider};

/// Joins the fleet whose controller answers at one of the URLs. No daemon may run; the next one runs as a node.
pub async fn join(data_dir: &DataDir, urls: &[String], token: &str, own: OwnHost) -> anyhow::Result<Fleet> {
    let token = ParsedJoinToken::parse(token)?;
    let addresses = urls.iter().map(|url| address(url)).collect::<anyhow::Result<Vec<_>>>()?;
    if let Some(joined) = membership::load(data_dir)? {
        let (controller, name) = (joined.fleet.controllers(), joined.fleet.name);
        let message = format!("this host has joined the fleet of {controller} already, as '{name}'");
        let dir = membership::dir_of(data_dir);
        let advice = format!(
            "to leave that fleet, remove the host there ('headwater node remove {name}') and remove {}",
            dir.display()
        );
        return Err(Problem::new(ProblemKind::Conflict, message).advise(advice).into());
    }
    has_nothing(data_dir).await?;
    let key = KeyPair::generate().context("cannot make a key")?;
    let public_key = key.public_key_raw().iter().map(|byte| format!("{byte:02x}")).collect();
    let verifier = Arc::new(Pinned { authority: token.authority });
    let mut config = client_config(verifier)?.with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let mut stream = connect_any(&addresses, &Arc::new(config)).await?;
    let join = Join {
        protocol: PROTOCOL,
        secret: token.secret,
        name: own.name.clone(),
        host: own.id,
        public_key,
        memory_bytes: own.memory_bytes,
        cpus: own.cpus,
    };
    wait_until_ready(&mut stream).await?;
    write_line(&mut stream, &FromNode::Join(join)).await?;
    match read_line(&mut stream, "the controller").await? {
        ToNode::Joined { certificate, authority } => {
            let controllers = addresses.iter().map(Address::url).collect();
            let fleet = Fleet { controllers, name: own.name };
            let joined = Joined { fleet: fleet.clone(), certificate, key: key.serialize_pem(), authority };
            membership::save(data_dir, &joined)?;
            Ok(fleet)
        }
        ToNode::Refused(problem) => Err(problem.into()),
        ToNode::Welcome { .. } | ToNode::Ready => {
            Err(Problem::new(ProblemKind::Invalid, "the controller's answer cannot be understood").into())
        }
    }
}

/// Replaces the URLs of the controllers of a host that has joined. No daemon may run.
pub fn set_controllers(data_dir: &DataDir, urls: &[String]) -> anyhow::Result<Fleet> {
    let addresses = urls.iter().map(|url| address(url)).collect::<anyhow::Result<Vec<_>>>()?;
    let Some(mut joined) = membership::load(data_dir)? else {
        let message = "this host has joined no fleet, so it needs a token";
        return Err(Problem::new(ProblemKind::Invalid, message)
            .advise("make one with 'headwater node token' on the controller, and pass it with --token")
            .into());
    };
    joined.fleet.controllers = addresses.iter().map(Address::url).collect();
    membership::save(data_dir, &joined)?;
    Ok(joined.fleet)
}

/// Fails for a host with its own machines, because their names could collide with machines of the fleet. Resets the
/// count of connections to an earlier controller.
async fn has_nothing(data_dir: &DataDir) -> anyhow::Result<()> {
    let database = SqliteDatabase::open(&data_dir.database()).await?;
    let read = async {
        let mut repo = database.write().await?;
        let machines = repo.machines().list().await?.len();
        let catalogs = repo.catalogs().list().await?.len();
        let hosts = repo.hosts().list().await?;
        for mut host in hosts {
            host.generation = 0;
            repo.hosts().update(&host).await?;
        }
        repo.save().await?;
        Ok::<_, headwater_db::DbError>((machines, catalogs))
    };
    let read = read.await;
    database.close().await;
    let (machines, catalogs) = read?;
    if machines == 0 && catalogs == 0 {
        return Ok(());
    }
    let message = format!(
        "this host has {machines} machine(s) and {catalogs} catalog(s), but a node must have none of its own"
    );
    let advice = "remove them first, or join with another data directory";
    Err(Problem::new(ProblemKind::Conflict, message).advise(advice).into())
}

/// A verifier that trusts a controller whose authority has this fingerprint.
#[derive(Debug)]
struct Pinned {
    authority: String,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let other = || Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = chain.iter().find(|it| hash_of(it) == self.authority).ok_or_else(other)?;
        let verifier = verifier_of(&authority.clone().into_owned()).map_err(|_| other())?;
        verifier.verify_server_cert(certificate, &[], name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &provider().signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &provider().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
