//! HTTP server for loaders: scripts, kernels, initramfs and settings. It sends no redirects and no bodies without a
//! length, and paths contain no escapes.
//!
//! | path | content |
//! |---|---|
//! | `/b/MAC/boot.ipxe`, `/b/MAC/grub.cfg` | the script of a machine, for iPXE or GRUB |
//! | `/l/NAME`, `/grub/NAME` | a loader, for firmware that boots from URLs; or GRUB's first configuration |
//! | `/a/MANIFEST/kernel`, `/a/MANIFEST/initrd` | kernel or initramfs of a version |
//! | `/t/TOKEN/settings.cpio` | the settings of the machine that the token was made for; each token is valid once |

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream;
use headwater_boot_script::{self as script, ScriptError, grub};
use headwater_dhcp::{Histories, Mac, Server};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::loaders::Loaders;
use crate::targets::{Artefact, Boot, Targets};
use crate::tokens::Tokens;

/// The most connections at a time; further connections wait to be accepted.
pub const CONNECTIONS_MAX: usize = 1024;
/// How long a client may take to send a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest duration of a connection: an initramfs over a slow link.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(3600);
/// The pause after a connection could not be accepted, for example because too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Files are read in pieces of this size.
const PIECE_BYTES: usize = 256 << 10;

type Body = BoxBody<Bytes, std::io::Error>;

/// The state of the HTTP server.
pub(crate) struct Http {
    pub(crate) targets: Arc<dyn Targets>,
    pub(crate) server: Server,
    loaders: Loaders,
    histories: Arc<Mutex<Histories>>,
    tokens: Mutex<Tokens<Boot>>,
    /// Settings whose length a client has asked for (HEAD), by the token that this used up. A GET with the token gets
    /// them from here.
    asked_about: Mutex<Tokens<Bytes>>,
    started: Instant,
}

/// The loader that a script is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Language {
    Ipxe,
    Grub,
}

impl Language {
    const fn file(self) -> &'static str {
        match self {
            Self::Ipxe => "boot.ipxe",
            Self::Grub => "grub.cfg",
        }
    }

    fn script(self, boot: &script::Boot) -> Result<String, ScriptError> {
        match self {
            Self::Ipxe => script::script(boot),
            Self::Grub => grub::configuration(boot),
        }
    }

    /// The answer for a machine that is not registered. GRUB runs the body of an error answer, too.
    fn unknown(self, mac: Mac) -> String {
        match self {
            Self::Ipxe => "this machine is not registered\n".to_owned(),
            Self::Grub => format!("echo \"headwater: {mac} is not registered\"\n"),
        }
    }

    fn refusal(self, machine: &str, why: &str, server: &Server, path: &str) -> Result<String, ScriptError> {
        match self {
            Self::Ipxe => script::refusal(machine, why, server.address, server.http_port, path),
            Self::Grub => grub::refusal(machine, why),
        }
    }
}

/// The meaning of a request's path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target<'a> {
    Script(Language, Mac),
    File(&'a str, Artefact),
    Settings(&'a str),
    Loader(&'a str),
}

impl<'a> Target<'a> {
    fn of(path: &'a str) -> Option<Self> {
        let mut parts = path.strip_prefix('/')?.split('/');
        // GRUB looks for its files next to the loader, or below the root.
        if path.starts_with("/l/") || path.starts_with("/grub/") {
            return Some(Self::Loader(path.strip_prefix("/l").unwrap_or(path)));
        }
        let found = match (parts.next()?, parts.next()?, parts.next()?) {
            ("b", mac, "boot.ipxe") => Self::Script(Language::Ipxe, mac.parse().ok()?),
            ("b", mac, "grub.cfg") => Self::Script(Language::Grub, mac.parse().ok()?),
            ("a", manifest, "kernel") => Self::File(manifest, Artefact::Kernel),
            ("a", manifest, "initrd") => Self::File(manifest, Artefact::Initrd),
            ("t", token, "settings.cpio") => Self::Settings(token),
            _ => return None,
        };
        parts.next().is_none().then_some(found)
    }
}

impl Http {
    pub(crate) fn new(
        targets: Arc<dyn Targets>,
        server: Server,
        loaders: Loaders,
        histories: Arc<Mutex<Histories>>,
        started: Instant,
    ) -> Self {
        Self {
            targets,
            server,
            loaders,
            histories,
            tokens: Mutex::default(),
            asked_about: Mutex::default(),
            started,
        }
    }

    /// Accepts connections, without end.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, client)) => {
                    let http = Arc::clone(&self);
                    tokio::spawn(async move {
                        http.connection(stream, client).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an HTTP connection of a booting machine");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, client: SocketAddr) {
        let service = service_fn(move |request: Request<Incoming>| {
            let http = Arc::clone(&self);
            async move { Ok::<_, Infallible>(http.answer(&request, client.ip()).await) }
        });
        let mut builder = hyper::server::conn::http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT).max_buf_size(64 << 10);
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(%client, %error, "an HTTP connection of a booting machine broke off")
            }
            Err(_) => {
                let limit_s = CONNECTION_TIMEOUT.as_secs();
                tracing::debug!(%client, limit_s,
                    "an HTTP connection of a booting machine was closed, because it lasted longer than the limit");
            }
        }
    }

    async fn answer(&self, request: &Request<Incoming>, client: IpAddr) -> Response<Body> {
        let is_head = request.method() == Method::HEAD;
        if request.method() != Method::GET && !is_head {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered\n".into());
        }
        let path = request.uri().path();
        match Target::of(path) {
            None => text(StatusCode::NOT_FOUND, "there is no such path\n".into()),
            Some(Target::Script(language, mac)) => self.script(language, mac, client).await,
            Some(Target::File(manifest, which)) => match self.targets.artefact(manifest, which) {
                Some(file) => send_file(&file, is_head).await,
                None => text(
                    StatusCode::NOT_FOUND,
                    "no kernel or initramfs of this version has been extracted\n".into(),
                ),
            },
            Some(Target::Loader(name)) => match self.loaders.find(name) {
                Some(loader) => send_loader(&loader, is_head),
                None => text(StatusCode::NOT_FOUND, "there is no such loader\n".into()),
            },
            Some(Target::Settings(token)) => self.settings(token, client, is_head).await,
        }
    }

    async fn script(&self, language: Language, mac: Mac, client: IpAddr) -> Response<Body> {
        let known = match self.targets.find(mac).await {
            Ok(Some(known)) => known,
            Ok(None) => return text(StatusCode::NOT_FOUND, language.unknown(mac)),
            Err(error) => {
                tracing::error!(%mac, error, "cannot look up a booting machine");
                return text(StatusCode::SERVICE_UNAVAILABLE, "the machine cannot be looked up\n".into());
            }
        };
        let now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.histories.lock().gave_script(mac, now_ms);
        let path = format!("/b/{}/{}", mac.dashed(), language.file());
        let made = match self.targets.boot(mac).await {
            Ok(boot) => self.script_of(language, boot, &path, client),
            Err(why) => Err(why),
        };
        let made = match made {
            Ok(script) => Ok(script),
            Err(why) => {
                self.targets.refused(mac, &why).await;
                language.refusal(&known.name, &why, &self.server, &path)
            }
        };
        match made {
            Ok(made) => text(StatusCode::OK, made),
            Err(error) => {
                tracing::error!(machine = known.name, %mac, %error, "cannot write the script that shows why a machine does not boot");
                text(StatusCode::INTERNAL_SERVER_ERROR, "the script cannot be written\n".into())
            }
        }
    }

    fn script_of(
        &self,
        language: Language,
        boot: Boot,
        path: &str,
        client: IpAddr,
    ) -> Result<String, String> {
        let token = self.targets.token().map_err(|e| format!("cannot make a token: {e}"))?;
        let manifest = boot.manifest.clone();
        let mut parts = script::Boot {
            machine: boot.machine.clone(),
            version: boot.version.clone(),
            server: self.server.address,
            port: self.server.http_port,
            script: path.to_owned(),
            kernel: format!("/a/{manifest}/kernel"),
            initrd: format!("/a/{manifest}/initrd"),
            settings: String::new(),
            options: boot.options.clone(),
        };
        let token = self.tokens.lock().add_boot(token, boot, client, self.started.elapsed());
        parts.settings = format!("/t/{token}/settings.cpio");
        language.script(&parts).map_err(|e| e.to_string())
    }

    async fn settings(&self, token: &str, client: IpAddr, is_head: bool) -> Response<Body> {
        let now = self.started.elapsed();
        let asked_about = self.asked_about.lock().take(token, client, now);
        if let Some(archive) = asked_about {
            if is_head {
                self.asked_about.lock().add(token, archive.clone(), client, now);
            }
            return whole(StatusCode::OK, "application/octet-stream", archive);
        }
        let boot = self.tokens.lock().take(token, client, self.started.elapsed());
        let Some(boot) = boot else {
            tracing::warn!(%client, "refused a request for settings: its token is used, expired, invalid, or belongs to another address");
            return text(StatusCode::FORBIDDEN, "this token is not valid\n".into());
        };
        match self.targets.settings(&boot).await {
            Ok(archive) => {
                tracing::info!(machine = boot.machine, version = boot.version, %client, "sent its settings to a machine that boots");
                let archive = Bytes::from(archive);
                if is_head {
                    // A loader that uses the firmware's HTTP asks for the length first.
                    self.asked_about.lock().add(token, archive.clone(), client, self.started.elapsed());
                }
                whole(StatusCode::OK, "application/octet-stream", archive)
            }
            Err(why) => {
                tracing::error!(
                    machine = boot.machine,
                    why,
                    "cannot prepare the settings of a booting machine"
                );
                text(StatusCode::SERVICE_UNAVAILABLE, "the settings cannot be prepared\n".into())
            }
        }
    }
}

fn text(status: StatusCode, text: String) -> Response<Body> {
    whole(status, "text/plain", text.into())
}

fn whole(status: StatusCode, kind: &'static str, bytes: Bytes) -> Response<Body> {
    let len = bytes.len();
    let body = Full::new(bytes).map_err(|never| match never {}).boxed();
    answer(status, kind, len as u64, body)
}

fn answer(status: StatusCode, kind: &'static str, len: u64, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    response.headers_mut().insert(CONTENT_LENGTH, len.into());
    response
}

fn send_loader(loader: &Arc<[u8]>, is_head: bool) -> Response<Body> {
    let len = loader.len() as u64;
    let bytes = if is_head { Bytes::new() } else { Bytes::from_owner(Arc::clone(loader)) };
    let body = Full::new(bytes).map_err(|never| match never {}).boxed();
    answer(StatusCode::OK, "application/efi", len, body)
}

async fn send_file(path: &Path, is_head: bool) -> Response<Body> {
    let opened = async {
        let file = tokio::fs::File::open(path).await?;
        let len = file.metadata().await?.len();
        Ok::<_, std::io::Error>((file, len))
    };
    let (file, len) = match opened.await {
        Ok(opened) => opened,
        Err(error) => {
            tracing::error!(path = %path.display(), %error, "cannot read the kernel or initramfs of a version");
            return text(StatusCode::INTERNAL_SERVER_ERROR, "the file cannot be read\n".into());
        }
    };
    if is_head {
        let empty = Full::new(Bytes::new()).map_err(|never| match never {}).boxed();
        return answer(StatusCode::OK, "application/octet-stream", len, empty);
    }
    let pieces = stream::try_unfold(file, |mut file| async move {
        let mut piece = vec![0; PIECE_BYTES];
        let read = file.read(&mut piece).await?;
        piece.truncate(read);
        Ok::<_, std::io::Error>((read > 0).then(|| (Frame::data(Bytes::from(piece)), file)))
    });
    answer(StatusCode::OK, "application/octet-stream", len, BodyExt::boxed(StreamBody::new(Box::pin(pieces))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_means_one_thing_or_nothing() {
        let mac = Mac([0x52, 0x54, 0, 1, 2, 3]);
        assert_eq!(Target::of("/b/52-54-00-01-02-03/boot.ipxe"), Some(Target::Script(Language::Ipxe, mac)));
        assert_eq!(Target::of("/b/52:54:00:01:02:03/grub.cfg"), Some(Target::Script(Language::Grub, mac)));
        assert_eq!(Target::of("/grub/grub.cfg"), Some(Target::Loader("/grub/grub.cfg")));
        assert_eq!(Target::of("/l/grub/grub.cfg"), Some(Target::Loader("/grub/grub.cfg")));
        assert_eq!(Target::of("/a/9f/kernel"), Some(Target::File("9f", Artefact::Kernel)));
        assert_eq!(Target::of("/a/9f/initrd"), Some(Target::File("9f", Artefact::Initrd)));
        assert_eq!(Target::of("/l/ipxe.efi"), Some(Target::Loader("/ipxe.efi")));
        assert_eq!(Target::of("/t/00/settings.cpio"), Some(Target::Settings("00")));
        for none in [
            "",
            "/",
            "/b",
            "/b/x/boot.ipxe",
            "/a/9f/kernel/x",
            "/a/../kernel/x",
            "a/9f/kernel",
            "//a/9f/kernel",
        ] {
            assert_eq!(Target::of(none), None, "{none}");
        }
    }
}
