//! TLS with the programs that people use, and every certificate that must not be let in.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use fixture::Raw;
use headwater_block::{Device, blocking};
use headwater_nbd::client::ConnectError;
use headwater_nbd::wire::handshake::{GoData, option, reply};
use headwater_nbd::wire::transmission::command;
use headwater_nbd::{
    Address, Client, Limits, Options, Server, ServerTls, ServerTlsOptions, SingleExport, TlsError,
};
use headwater_testkit::conformance;
use headwater_testkit::pki::{Authority, CertificateOptions};
use headwater_testkit::{
    Log, ReferenceDisk, ReferenceOptions, Waits, alone, resident_bytes, run, wait_until,
};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, HandshakeKind, RootCertStore, StreamOwned};

const MIB: u64 = 1 << 20;
const USUAL: CertificateOptions = CertificateOptions { is_expired: false, serial: 0 };

struct Secured {
    disk: Arc<ReferenceDisk>,
    server: Server,
    authority: Authority,
    directory: tempfile::TempDir,
}

impl Secured {
    fn new(disk: ReferenceDisk, options: ServerTlsOptions, allowed: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new("the authority");
        let files = authority.write_certificates(
            &directory.path().join("pki"),
            &[("server", "localhost", USUAL), ("client", "desk-7", USUAL)],
        );
        Self::in_directory(disk, options, allowed, directory, authority, &files)
    }

    fn in_directory(
        disk: ReferenceDisk,
        tls: ServerTlsOptions,
        allowed: Option<&str>,
        directory: tempfile::TempDir,
        authority: Authority,
        files: &Path,
    ) -> Self {
        let disk = Arc::new(disk);
        let device: Arc<dyn Device> = disk.clone();
        let export = match allowed {
            None => SingleExport::new(device, "secret"),
            Some(name) => SingleExport::for_clients(device, "secret", vec![name.to_owned()]),
        };
        let tls = Some(ServerTls::load(files, tls).unwrap());
        // All refusals of one client are counted in the log.
        let limits = Limits { handshake_timeout_ms: 20_000, warnings_per_10_s: 1000, ..Limits::default() };
        let address = Address::Tcp { host: "localhost".into(), port: 0 };
        let server = Server::bind(address, export, Options { limits, tls }).unwrap();
        Self { disk, server, authority, directory }
    }

    fn pki(&self) -> PathBuf {
        self.directory.path().join("pki")
    }

    /// The URI with the files of a client.
    fn uri(&self, files: &Path) -> String {
        let uri = self.server.uri().replacen("nbd:", "nbds:", 1);
        format!("{uri}?tls-certificates={}", files.display())
    }

    fn port(&self) -> String {
        self.server.uri().rsplit_once(':').unwrap().1.trim_end_matches('/').to_owned()
    }

    /// A client with a certificate of this name from this authority; without a name none.
    fn client(&self, authority: &Authority, name: Option<&str>, oddity: CertificateOptions) -> PathBuf {
        let at = self.directory.path().join(format!("client-{}", name.unwrap_or("nobody")));
        // The server's authority is trusted whoever signed the client's own certificate.
        let roles: Vec<_> = name.iter().map(|name| ("client", *name, oddity)).collect();
        authority.write_certificates(&at, &roles);
        std::fs::copy(self.pki().join("ca-cert.pem"), at.join("ca-cert.pem")).unwrap();
        at
    }

    fn is_alive(&self) {
        let client = Client::open(&self.uri(&self.pki())).unwrap();
        blocking::read(&*client, 0, &mut [0; 4096]).unwrap();
    }
}

const REQUIRED: ServerTlsOptions = ServerTlsOptions { is_required: true, verifies_clients: false };
const VERIFIED: ServerTlsOptions = ServerTlsOptions { is_required: true, verifies_clients: true };
const OFFERED: ServerTlsOptions = ServerTlsOptions { is_required: false, verifies_clients: false };

fn late() -> ReferenceOptions {
    ReferenceOptions { waits: Waits::PerMille(300), delay: Duration::from_micros(30), ..Default::default() }
}

#[test]
fn a_disk_behind_tls_passes_the_suite() {
    let secured = Secured::new(ReferenceDisk::with_options(4 * MIB, late()), VERIFIED, None);
    let client: Arc<dyn Device> = Client::open(&secured.uri(&secured.pki())).unwrap();
    let model = conformance::check(&client, &conformance::Options::seeded(61));
    conformance::verify(&*secured.disk, &model);
}

#[test]
fn large_requests_cross_records_and_buffers() {
    let options = ReferenceOptions { lends: true, ..late() };
    let secured = Secured::new(ReferenceDisk::with_options(64 * MIB, options), REQUIRED, None);
    let client = Client::open(&secured.uri(&secured.pki())).unwrap();
    let data: Vec<u8> = (0..17 * MIB).map(|at| (at % 251) as u8).collect();
    blocking::write(&*client, 3 * MIB, &data).unwrap();
    let mut back = vec![0; data.len()];
    blocking::read(&*client, 3 * MIB, &mut back).unwrap();
    assert!(back == data, "what was written does not come back");
}

#[test]
fn libnbd_and_qemu_connect() {
    let secured = Secured::new(ReferenceDisk::with_options(8 * MIB, late()), VERIFIED, Some("desk-7"));
    let client = Client::open(&secured.uri(&secured.pki())).unwrap();
    blocking::write(&*client, MIB, &[7; 8192]).unwrap();
    let info = run("libnbd-bin", "nbdinfo", &[&secured.uri(&secured.pki())]);
    assert!(info.contains("protocol: newstyle-fixed with TLS"), "{info}");
    assert!(info.contains("description: secret"), "{info}");
    let list = run("libnbd-bin", "nbdinfo", &["--list", &secured.uri(&secured.pki())]);
    assert!(list.contains("secret"), "{list}");
    let copy = secured.directory.path().join("copy.raw");
    run("libnbd-bin", "nbdcopy", &[&secured.uri(&secured.pki()), copy.to_str().unwrap()]);
    assert!(std::fs::read(&copy).unwrap() == secured.disk.contents(), "the copy differs");

    let (files, port) = (secured.pki(), secured.port());
    let credentials = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", files.display());
    let options =
        format!("driver=nbd,server.type=inet,server.host=localhost,server.port={port},tls-creds=tls0");
    let through = ["--object", &credentials, "--image-opts"];
    let output = secured.directory.path().join("qemu.raw");
    let mut convert = vec!["convert"];
    convert.extend(through);
    convert.extend(["-O", "raw", &options, output.to_str().unwrap()]);
    run("qemu-utils", "qemu-img", &convert);
    assert!(std::fs::read(&output).unwrap() == secured.disk.contents(), "QEMU's copy differs");
    let mut patterns = vec!["--object", &credentials, "--image-opts"];
    patterns.extend(["-c", "write -P 0x5a 2M 3M", "-c", "read -P 0x5a 2M 3M", "-c", "flush", &options]);
    run("qemu-utils", "qemu-io", &patterns);
    assert!(secured.disk.contents()[2 << 20..5 << 20].iter().all(|byte| *byte == 0x5a));
}

/// What our own client and libnbd say.
fn refusals(uri: &str) -> (String, String) {
    let Err(error) = Client::open(uri) else { panic!("{uri} was opened") };
    let output = Command::new("nbdinfo").arg(uri).output();
    let output = output.expect("nbdinfo runs; install it: apt-get install libnbd-bin");
    assert!(!output.status.success(), "nbdinfo opened {uri}");
    (error.to_string(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// What all servers of this program log.
static LOG: LazyLock<Log> = LazyLock::new(Log::of_warnings);

/// How many clients were refused for one of these reasons. Alerts are of clients that refuse their server, in another test.
fn refused(reasons: &[&str]) -> usize {
    let lines = LOG.lines_with(&["TLS did not start: "]);
    let is_one =
        |line: &&String| !line.contains("alert") && reasons.iter().any(|reason| line.contains(reason));
    lines.iter().filter(is_one).count()
}

/// QEMU as a client with these files, which it is not to look at itself.
fn qemu_info(secured: &Secured, files: &Path) -> std::process::Output {
    let credentials =
        format!("tls-creds-x509,id=tls0,endpoint=client,sanity-check=off,dir={}", files.display());
    let port = secured.port();
    let image =
        format!("driver=nbd,server.type=inet,server.host=localhost,server.port={port},tls-creds=tls0");
    let output =
        Command::new("qemu-img").args(["info", "--object", &credentials, "--image-opts", &image]).output();
    output.expect("qemu-img runs; install it: apt-get install qemu-utils")
}

#[test]
fn clients_without_a_valid_certificate_are_refused() {
    LazyLock::force(&LOG);
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("the authority");
    let files = authority.write_certificates(
        &directory.path().join("pki"),
        &[("server", "localhost", USUAL), ("client", "desk-7", USUAL)],
    );
    authority.revoke(&files, 99);
    let disk = ReferenceDisk::new(MIB);
    let secured = Secured::in_directory(disk, VERIFIED, None, directory, authority, &files);
    let stranger = Authority::new("somebody else");
    let expired = CertificateOptions { is_expired: true, serial: 0 };
    let withdrawn = CertificateOptions { is_expired: false, serial: 99 };
    assert!(qemu_info(&secured, &secured.pki()).status.success(), "QEMU with a good certificate");
    let none = "sent no certificates";
    for (what, files, reasons) in [
        ("none", secured.client(&secured.authority, None, USUAL), &[none][..]),
        // GnuTLS shows no certificate where the server trusts nobody who has signed it.
        ("another authority's", secured.client(&stranger, Some("stranger"), USUAL), &["UnknownIssuer", none]),
        ("an expired one", secured.client(&secured.authority, Some("late"), expired), &["xpired"]),
        ("a withdrawn one", secured.client(&secured.authority, Some("gone"), withdrawn), &["Revoked"]),
    ] {
        let before = refused(reasons);
        let (ours, _) = refusals(&secured.uri(&files));
        assert!(ours.contains("nbds://"), "{what}: {ours}");
        let qemu = qemu_info(&secured, &files);
        assert!(!qemu.status.success() && qemu.stdout.is_empty(), "{what}: {qemu:?}");
        // Ours, libnbd and QEMU.
        wait_until(format!("refusals of {what}"), || refused(reasons) == before + 3);
        secured.is_alive();
    }
}

#[test]
fn servers_with_a_wrong_certificate_are_refused() {
    let authority = Authority::new("the authority");
    let cases = [
        ("wrong-name", "elsewhere.example", USUAL, "elsewhere.example"),
        ("expired", "localhost", CertificateOptions { is_expired: true, serial: 0 }, "xpired"),
    ];
    for (what, name, oddity, said) in cases {
        let directory = tempfile::tempdir().unwrap();
        let files = authority.write_certificates(&directory.path().join("pki"), &[("server", name, oddity)]);
        let authority = Authority::new("unused");
        let disk = ReferenceDisk::new(MIB);
        let secured = Secured::in_directory(disk, REQUIRED, None, directory, authority, &files);
        let (ours, libnbd) = refusals(&secured.uri(&secured.pki()));
        assert!(ours.contains(said), "{what}: {ours}");
        assert!(libnbd.contains("ertificate"), "{what}: {libnbd}");
    }
    let secured = Secured::new(ReferenceDisk::new(MIB), REQUIRED, None);
    let stranger = Authority::new("somebody else");
    let files = stranger.write_certificates(&secured.directory.path().join("stranger"), &[]);
    let (ours, _) = refusals(&secured.uri(&files));
    assert!(ours.contains("UnknownIssuer"), "{ours}");
    // The name that counts can be given.
    let uri =
        format!("{}&tls-hostname=localhost", secured.uri(&secured.pki()).replace("localhost:", "127.0.0.1:"));
    Client::open(&uri).unwrap();
}

#[test]
fn an_export_is_for_those_whose_certificate_names_them() {
    LazyLock::force(&LOG);
    let secured = Secured::new(ReferenceDisk::new(MIB), VERIFIED, Some("desk-7"));
    let other = secured.client(&secured.authority, Some("desk-8"), USUAL);
    let (ours, libnbd) = refusals(&secured.uri(&other));
    assert!(ours.contains("do not allow this export"), "{ours}");
    assert!(libnbd.contains("opt_go"), "{libnbd}");
    let output = Command::new("nbdinfo").args(["--list", &secured.uri(&other)]).output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stdout).contains("secret"), "it is listed");
    // Ours and libnbd.
    let words = ["client ", "the export ''", "do not allow this export", "names 'desk-8'"];
    wait_until("the log says who wanted what, and why not", || LOG.lines_with(&words).len() >= 2);
    secured.is_alive();
}

#[test]
fn required_tls_refuses_plain_clients() {
    LazyLock::force(&LOG);
    let secured = Secured::new(ReferenceDisk::new(MIB), REQUIRED, None);
    assert!(secured.server.uri().starts_with("nbds://"), "{}", secured.server.uri());
    let plain = secured.server.uri().replacen("nbds:", "nbd:", 1);
    let (ours, libnbd) = refusals(&plain);
    assert!(ours.contains("demands TLS; write nbds://"), "{ours}");
    assert!(libnbd.contains("opt_go"), "{libnbd}");
    wait_until("the log says why", || {
        LOG.lines_with(&["client ", "does not use TLS, which this server requires"]).len() >= 2
    });
    secured.is_alive();
}

#[test]
fn optional_tls_accepts_both_and_offers_encryption() {
    let secured = Secured::new(ReferenceDisk::new(MIB), OFFERED, None);
    for uri in [secured.server.uri(), secured.uri(&secured.pki())] {
        let client = Client::open(&uri).unwrap();
        blocking::write(&*client, 0, &[3; 4096]).unwrap();
    }
    let bare = fixture::Fixture::new(ReferenceDisk::new(MIB));
    let uri = bare.server.uri().replacen("nbd+", "nbds+", 1);
    let uri = format!("{uri}&tls-certificates={}", secured.pki().display());
    let Err(error) = Client::open(&uri) else { panic!("it was opened") };
    assert!(matches!(&error, ConnectError::NotEncrypted { .. }), "{error}");
    assert!(error.to_string().contains("has no TLS; write nbd://"), "{error}");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let secured = Secured::new(ReferenceDisk::new(MIB), REQUIRED, None);
    let at = secured.pki();
    let load = || match ServerTls::load(&at, VERIFIED) {
        Ok(_) => panic!("it was loaded"),
        Err(error) => error,
    };
    let key = std::fs::read(at.join("server-key.pem")).unwrap();
    std::fs::remove_file(at.join("server-key.pem")).unwrap();
    let error = load();
    assert!(matches!(&error, TlsError::Missing { path, .. } if path.ends_with("server-key.pem")), "{error}");
    assert!(error.to_string().contains("no such file"), "{error}");
    assert!(error.to_string().contains("a private key in PEM"), "{error}");
    std::fs::write(at.join("server-key.pem"), &key[..key.len() / 2]).unwrap();
    assert!(load().to_string().contains("server-key.pem"));
    std::fs::copy(at.join("client-key.pem"), at.join("server-key.pem")).unwrap();
    assert!(matches!(load(), TlsError::Together { .. }));
    std::fs::write(at.join("ca-cert.pem"), "nothing").unwrap();
    assert!(load().to_string().contains("no certificates in PEM form"));
}

#[test]
fn changed_certificate_files_apply_to_new_clients() {
    let secured = Secured::new(ReferenceDisk::new(MIB), VERIFIED, None);
    let before = secured.client(&secured.authority, Some("desk-7"), USUAL);
    let is_let_in = |files: &Path| Client::open(&secured.uri(files)).is_ok();
    let open = Client::open(&secured.uri(&before)).unwrap();
    let other = Authority::new("another authority");
    other.write_certificates(&secured.pki(), &[("server", "localhost", USUAL), ("client", "desk-7", USUAL)]);
    wait_until("the new certificate", || is_let_in(&secured.pki()));
    assert!(!is_let_in(&before));
    blocking::read(&*open, 0, &mut [0; 4096]).unwrap();
    // One is withdrawn, also while its list is away for a moment.
    let withdrawn =
        secured.client(&other, Some("gone"), CertificateOptions { is_expired: false, serial: 99 });
    assert!(is_let_in(&withdrawn));
    other.revoke(&secured.pki(), 99);
    wait_until("the list of withdrawn certificates", || !is_let_in(&withdrawn));
    std::fs::remove_file(secured.pki().join("ca-crl.pem")).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!is_let_in(&withdrawn) && is_let_in(&secured.pki()));
    // What cannot be read locks nobody out.
    std::fs::write(secured.pki().join("server-key.pem"), "").unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(is_let_in(&secured.pki()));
}

#[test]
fn unusable_certificate_files_are_tried_again() {
    LazyLock::force(&LOG);
    let secured = Secured::new(ReferenceDisk::new(MIB), VERIFIED, None);
    let pki = secured.pki();
    let withdrawn = secured.client(
        &secured.authority,
        Some("gone"),
        CertificateOptions { is_expired: false, serial: 99 },
    );
    let is_let_in = |files: &Path| Client::open(&secured.uri(files)).is_ok();
    assert!(is_let_in(&withdrawn));
    let list = pki.join("ca-crl.pem");
    secured.authority.revoke(&pki, 99);
    let good = std::fs::read(&list).unwrap();
    let put = |bytes: &[u8]| {
        std::fs::write(&list, bytes).unwrap();
        std::fs::File::open(&list).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    };
    put(&vec![b'x'; good.len()]);
    let told = || LOG.lines_with(&[list.to_str().unwrap(), "TLS files have changed"]).len();
    wait_until("the log names the file", || is_let_in(&pki) && told() > 0);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(is_let_in(&pki) && told() == 1, "it is said once");
    put(&good);
    wait_until("the list of withdrawn certificates", || !is_let_in(&withdrawn));
    assert!(is_let_in(&pki));
}

#[test]
fn one_certificate_cannot_occupy_all_connections() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("the authority");
    let roles = [("server", "localhost", USUAL), ("client", "desk-7", USUAL)];
    let files = authority.write_certificates(&directory.path().join("pki"), &roles);
    let of_another =
        authority.write_certificates(&directory.path().join("another"), &[("client", "desk-8", USUAL)]);
    let tls = Some(ServerTls::load(&files, VERIFIED).unwrap());
    let limits = Limits { connections: 16, ..Limits::default() };
    let address = Address::Tcp { host: "localhost".into(), port: 0 };
    let disk: Arc<dyn Device> = Arc::new(ReferenceDisk::new(MIB));
    let server = Server::bind(address, SingleExport::new(disk, ""), Options { limits, tls }).unwrap();
    let open = |files: &Path| {
        let uri = server.uri().replacen("nbd:", "nbds:", 1);
        Client::open(&format!("{uri}?tls-certificates={}", files.display()))
    };
    let reads = |client: &Arc<Client>| blocking::read(&**client, 0, &mut [0; 4096]).is_ok();
    let greedy: Vec<Arc<Client>> = (0..16).map(|_| open(&files).unwrap()).collect();
    assert!(open(&files).is_err());
    let other = open(&of_another).unwrap();
    assert!(reads(&other));
    wait_until("the newest gives way", || !reads(&greedy[15]));
    assert!(greedy[..15].iter().all(reads));
}

#[test]
fn reconnecting_clients_show_their_certificate_again() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("the authority");
    let roles = [("server", "localhost", USUAL), ("client", "desk-7", USUAL)];
    let files = authority.write_certificates(&directory.path().join("pki"), &roles);
    let tls = Some(ServerTls::load(&files, VERIFIED).unwrap());
    let path = directory.path().join("s");
    let disk: Arc<dyn Device> = Arc::new(ReferenceDisk::new(MIB));
    let limits = Limits::default();
    let _server =
        Server::bind(Address::Unix(path.clone()), SingleExport::new(disk, ""), Options { limits, tls })
            .unwrap();
    let certificate = CertificateDer::from_pem_file(files.join("client-cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(files.join("client-key.pem")).unwrap();
    // In 1.2 a server keeps sessions by itself. The client keeps its own for the next connection.
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_root_certificates(authority_in(&files))
        .with_client_auth_cert(vec![certificate], key)
        .unwrap();
    let config = Arc::new(config);
    for _ in 0..2 {
        let raw = encrypted_with(&path, Arc::clone(&config));
        assert_eq!(raw.0.conn.handshake_kind(), Some(HandshakeKind::Full));
    }
}

fn authority_in(files: &Path) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(files.join("ca-cert.pem")).unwrap()).unwrap();
    roots
}

/// A raw connection in the transmission phase, encrypted.
fn encrypted(path: &Path, files: &Path) -> Raw<StreamOwned<ClientConnection, UnixStream>> {
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(authority_in(files))
        .with_no_client_auth();
    encrypted_with(path, Arc::new(config))
}

fn encrypted_with(path: &Path, config: Arc<ClientConfig>) -> Raw<StreamOwned<ClientConnection, UnixStream>> {
    let mut raw = Raw::connect(path);
    raw.greet();
    raw.option(option::STARTTLS, &[]);
    assert_eq!(raw.answer().0, reply::ACK);
    let connection = ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
    let mut raw = Raw(StreamOwned::new(connection, raw.0));
    raw.choose(false);
    raw
}

#[test]
fn a_trickling_tls_record_does_not_keep_its_memory() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("the authority");
    let files =
        authority.write_certificates(&directory.path().join("pki"), &[("server", "localhost", USUAL)]);
    let tls = Some(ServerTls::load(&files, REQUIRED).unwrap());
    let limits = Limits { shared_bytes: 64 << 20, send_stall_ms: 300, ..Limits::default() };
    let path = directory.path().join("s");
    let disk = Arc::new(ReferenceDisk::new(32 * MIB));
    let device: Arc<dyn Device> = disk.clone();
    let server =
        Server::bind(Address::Unix(path.clone()), SingleExport::new(device, ""), Options { limits, tls })
            .unwrap();
    let mut slow = encrypted(&path, &files);
    slow.request(command::WRITE, 0, 1, 0, 32 << 20);
    wait_until("its memory is set aside", || server.shared_bytes_used() > 0);
    let mut other = encrypted(&path, &files);
    let writing = std::thread::spawn(move || {
        other.request(command::WRITE, 0, 2, 0, 32 << 20);
        other.send(&vec![2; 32 << 20]);
        other.simple()
    });
    let StreamOwned { conn, sock } = &mut slow.0;
    conn.writer().write_all(&[1; 16 << 10]).unwrap();
    let mut record = Vec::new();
    conn.write_tls(&mut record).unwrap();
    let mut bytes = record.chunks(1);
    wait_until("the other's write is done", || {
        // Until it is cut.
        let _ = bytes.next().map(|byte| sock.write(byte));
        writing.is_finished()
    });
    assert_eq!(writing.join().unwrap(), (0, 2));
    assert!(disk.contents().iter().all(|byte| *byte == 2));
}

/// Clients that are promised TLS and begin it not, or only half of it: the oldest give way, and memory stays bounded.
#[test]
fn hundreds_of_half_open_tls_handshakes_keep_nobody_out() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("the authority");
    let files =
        authority.write_certificates(&directory.path().join("pki"), &[("server", "localhost", USUAL)]);
    let tls = Some(ServerTls::load(&files, REQUIRED).unwrap());
    let limits = Limits { half_open: 20, handshake_timeout_ms: 600_000, ..Limits::default() };
    let path = directory.path().join("s");
    let disk: Arc<dyn Device> = Arc::new(ReferenceDisk::new(MIB));
    let server =
        Server::bind(Address::Unix(path.clone()), SingleExport::new(disk, ""), Options { limits, tls })
            .unwrap();
    let is_alive = || {
        let mut raw = encrypted(&path, &files);
        raw.request(command::READ, 0, 1, 0, 512);
        assert_eq!(raw.simple(), (0, 1));
        assert_eq!(raw.take_vec(512), [0; 512]);
    };
    is_alive();
    let (before, mut most) = (resident_bytes(), 0);
    let mut held = Vec::new();
    for round in 0..200 {
        let mut raw = Raw::connect(&path);
        raw.greet();
        raw.option(option::STARTTLS, &[]);
        assert_eq!(raw.answer().0, reply::ACK);
        if round % 2 == 0 {
            // The header of a record of 16 KiB, and a part of it.
            raw.send(&[0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3]);
        }
        held.push(raw);
        if round % 50 == 0 {
            is_alive();
        }
        most = most.max(resident_bytes());
    }
    is_alive();
    let taken = most.max(resident_bytes()).saturating_sub(before);
    assert!(taken < 32 << 20, "{taken} bytes");
    // Their time is not over: the others have taken their places.
    wait_until("the oldest gave way", || server.connections() <= 20);
    drop(held);
}

#[test]
fn garbage_instead_of_tls_costs_its_own_connection() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("the authority");
    let files =
        authority.write_certificates(&directory.path().join("pki"), &[("server", "localhost", USUAL)]);
    let tls = Some(ServerTls::load(&files, REQUIRED).unwrap());
    let limits = Limits { handshake_timeout_ms: 3_000, ..Limits::default() };
    let path = directory.path().join("s");
    let disk: Arc<dyn Device> = Arc::new(ReferenceDisk::new(MIB));
    let server =
        Server::bind(Address::Unix(path.clone()), SingleExport::new(disk, ""), Options { limits, tls })
            .unwrap();
    let start = |path: &Path| {
        let mut raw = Raw::connect(path);
        raw.greet();
        raw.option(option::STARTTLS, &[]);
        assert_eq!(raw.answer().0, reply::ACK);
        raw
    };
    let mut liar = start(&path);
    liar.send(&[0xff; 5000]);
    // An alert may come before the end.
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut liar.0, &mut rest);
    let silent = start(&path);
    let mut early = Raw::connect(&path);
    early.greet();
    for number in [option::LIST, option::STRUCTURED_REPLY, 77] {
        early.option(number, &[]);
        assert_eq!(early.answer().0, reply::ERR_TLS_REQD, "option {number}");
    }
    early.option(option::STARTTLS, b"x");
    assert_eq!(early.answer().0, reply::ERR_INVALID);
    let mut go = Vec::new();
    GoData { name: "", wanted: vec![] }.encode(&mut go);
    early.option(option::GO, &go);
    assert_eq!(early.answer().0, reply::ERR_TLS_REQD);
    early.option(option::EXPORT_NAME, b"");
    early.ends();
    wait_until("the silent client to be cut off", || server.connections() == 0);
    drop(silent);
    let uri = format!("{}&tls-certificates={}", server.uri(), files.display());
    let client = Client::open(&uri).unwrap();
    blocking::flush(&*client).unwrap();
}
