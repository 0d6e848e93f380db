//! A real S3 server in a process of its own, on loopback, over a temporary directory.
//!
//! The process is the test program itself, started once more with only one test, which begins with
//! [`serve_if_asked`]. It ends when the program that started it ends, in whatever way. It serves plain files,
//! so that tests can examine and damage the contents of a bucket: `DIR/BUCKET/KEY`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use hyper::service::Service;
use hyper_util::rt::TokioIo;
use s3s::access::S3Access;
use s3s::dto::{CreateMultipartUploadInput, PutObjectInput};
use s3s::{S3Error, S3ErrorCode, S3Request, S3Result};

/// The name of the one key that the server knows.
pub const KEY_ID: &str = "test-key";
/// That key.
pub const KEY_SECRET: &str = "test-secret";

const ROOT_VARIABLE: &str = "HEADWATER_TEST_S3_ROOT";
const LISTEN_VARIABLE: &str = "HEADWATER_TEST_S3_LISTEN";
const LISTENING: &str = "the S3 server listens on ";

/// A feature of Amazon's S3 that a server lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum S3Quirk {
    /// It ignores `If-None-Match` on PUT.
    IgnoresIfNoneMatch,
    /// It ignores `If-Match` on PUT.
    IgnoresIfMatch,
    /// It answers 501 to a conditional PUT.
    ConditionsAre501,
    /// It answers 400 to a conditional PUT.
    ConditionsAre400,
    /// It answers 501 to an upload in parts.
    PartsAre501,
    /// It answers 400 to an upload in parts.
    PartsAre400,
}

impl S3Quirk {
    const ALL: [Self; 6] = [
        Self::IgnoresIfNoneMatch,
        Self::IgnoresIfMatch,
        Self::ConditionsAre501,
        Self::ConditionsAre400,
        Self::PartsAre501,
        Self::PartsAre400,
    ];
}

/// The file in which the server finds its quirk.
const QUIRK: &str = ".quirk";

/// A server that runs as long as this lives.
#[derive(Debug)]
pub struct S3Server {
    child: Child,
    address: SocketAddr,
    dir: PathBuf,
    test: String,
}

impl S3Server {
    /// Starts a server over `dir`. `test` is the name of a test that begins with [`serve_if_asked`].
    pub fn start(dir: &Path, test: &str) -> Self {
        let (child, address) = Self::run(dir, test, "127.0.0.1:0");
        Self { child, address, dir: dir.to_owned(), test: test.to_owned() }
    }

    /// Kills its process.
    pub fn kill(&mut self) {
        self.child.kill().expect("it can be ended");
        self.child.wait().expect("it ended");
    }

    /// Comes back at the same address, with the same keys.
    pub fn revive(&mut self) {
        (self.child, self.address) = Self::run(&self.dir, &self.test, &self.address.to_string());
    }

    fn run(dir: &Path, test: &str, listen: &str) -> (Child, SocketAddr) {
        let program = std::env::current_exe().expect("a test knows its program");
        let mut child = Command::new(program)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROOT_VARIABLE, dir)
            .env(LISTEN_VARIABLE, listen)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the S3 server starts");
        let mut lines = BufReader::new(child.stdout.take().expect("it has an output")).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.split_once(LISTENING)?.1.trim().parse().ok())
            .expect("the S3 server says where it listens; does that test begin with serve_if_asked?");
        std::thread::spawn(move || lines.for_each(drop));
        (child, address)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes a bucket, and returns the directory of its keys.
    pub fn bucket(&self, name: &str) -> PathBuf {
        let dir = self.dir.join(name);
        std::fs::create_dir_all(&dir).expect("a bucket can be made");
        dir
    }

    /// Removes a feature of the server, in all buckets; `None` restores it.
    pub fn set_quirk(&self, quirk: Option<S3Quirk>) {
        let text = quirk.map(|quirk| format!("{quirk:?}")).unwrap_or_default();
        std::fs::write(self.dir.join(QUIRK), text).expect("a file can be written");
    }

    /// Replaces the bytes of a key, as another client would: the server reports another tag from now on.
    pub fn replace(&self, bucket: &str, key: &str, bytes: &[u8]) {
        use base64::Engine;
        let encode = |text| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(text);
        // The file in which the server keeps tags.
        let remembered = format!(".bucket-{}.object-{}.internal.json", encode(bucket), encode(key));
        std::fs::remove_file(self.dir.join(remembered)).expect("the server wrote the key");
        std::fs::write(self.dir.join(bucket).join(key), bytes).expect("a key can be written");
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server's part, at the beginning of a test. It does nothing unless [`S3Server::start`] started this
/// process, and then it does not return.
pub fn serve_if_asked() {
    let Some(root) = std::env::var_os(ROOT_VARIABLE) else { return };
    // Ends with the program that started this process, and removes the directory. The server that all tests
    // of a program share is in a static, which is never dropped.
    let root = PathBuf::from(root);
    let removed = root.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = std::fs::remove_dir_all(removed);
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(serve(&root));
}

async fn serve(root: &Path) {
    let files = s3s_fs::FileSystem::new(root).expect("the server's directory is there");
    let mut builder = s3s::service::S3ServiceBuilder::new(files);
    builder.set_auth(s3s::auth::SimpleAuth::from_single(KEY_ID, KEY_SECRET));
    builder.set_access(Lacking { root: root.to_owned() });
    let service = builder.build();
    // The server checks a condition and then writes. A real server does both atomically, so this one must,
    // too.
    let conditional = Arc::new(tokio::sync::Mutex::new(()));
    let listen = std::env::var(LISTEN_VARIABLE).expect("it is told where to listen");
    let listener = tokio::net::TcpListener::bind(listen).await.expect("a free port");
    println!("{LISTENING}{}", listener.local_addr().expect("it has an address"));
    let _ = std::io::stdout().flush();
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        // Like real servers: an answer's body does not wait until its head is acknowledged.
        let _ = socket.set_nodelay(true);
        let (service, conditional) = (service.clone(), Arc::clone(&conditional));
        tokio::spawn(async move {
            let answer = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                let (service, conditional) = (service.clone(), Arc::clone(&conditional));
                async move {
                    // Reading takes the bytes and their tag one after the other, too.
                    let is_conditional = request.method() == hyper::Method::GET
                        || ["if-match", "if-none-match"]
                            .iter()
                            .any(|name| request.headers().contains_key(*name));
                    let _alone = if is_conditional { Some(conditional.lock().await) } else { None };
                    Service::call(&service, request).await
                }
            });
            // A client that disconnects is not a failure of the server.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(socket), answer)
                .await;
        });
    }
}

/// Changes or refuses requests according to the server's quirk.
struct Lacking {
    root: PathBuf,
}

type Checked<'a> = Pin<Box<dyn Future<Output = S3Result<()>> + Send + 'a>>;

impl Lacking {
    fn quirk(&self) -> Option<S3Quirk> {
        let text = std::fs::read_to_string(self.root.join(QUIRK)).ok()?;
        S3Quirk::ALL.into_iter().find(|quirk| format!("{quirk:?}") == text)
    }
}

fn refuse(code: S3ErrorCode) -> S3Result<()> {
    Err(S3Error::new(code))
}

// Written as the macro expands that declares the trait.
impl S3Access for Lacking {
    fn put_object<'life0, 'life1, 'async_trait>(
        &'life0 self,
        request: &'life1 mut S3Request<PutObjectInput>,
    ) -> Checked<'async_trait>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        let input = &mut request.input;
        let is_conditional = input.if_match.is_some() || input.if_none_match.is_some();
        let outcome = match self.quirk() {
            Some(S3Quirk::IgnoresIfNoneMatch) => {
                input.if_none_match = None;
                Ok(())
            }
            Some(S3Quirk::IgnoresIfMatch) => {
                input.if_match = None;
                Ok(())
            }
            Some(S3Quirk::ConditionsAre501) if is_conditional => refuse(S3ErrorCode::NotImplemented),
            Some(S3Quirk::ConditionsAre400) if is_conditional => refuse(S3ErrorCode::InvalidArgument),
            _ => Ok(()),
        };
        Box::pin(std::future::ready(outcome))
    }

    fn create_multipart_upload<'life0, 'life1, 'async_trait>(
        &'life0 self,
        _: &'life1 mut S3Request<CreateMultipartUploadInput>,
    ) -> Checked<'async_trait>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        let outcome = match self.quirk() {
            Some(S3Quirk::PartsAre501) => refuse(S3ErrorCode::NotImplemented),
            Some(S3Quirk::PartsAre400) => refuse(S3ErrorCode::InvalidArgument),
            _ => Ok(()),
        };
        Box::pin(std::future::ready(outcome))
    }
}
