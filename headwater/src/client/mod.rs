//! A client of the daemon's API: HTTP/1 over the unix socket, or over TLS to another host. Each request has its own
//! connection.

mod clouds;
mod console;
mod personality;
pub mod server;
pub mod tasks;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use headwater_api::{
    BeginLogin, BegunLogin, BootTrace, CacheContents, CallerInfo, Catalog, CatalogAdvice, CatalogList,
    Channel, ChannelPointer, ChannelRequest, Claim, ClaimList, ClaimRequest, ConsoleLink, CreateCatalog,
    CreateConsoleTicket, CreateJoinToken, CreateMachine, CreateToken, EventList, ExecRequest, ExecResult,
    FinishLogin, Host, HostList, Image, ImageList, ImageVersion, JoinToken, MAX_EVENTS, MAX_TASKS, Machine,
    MachineList, MachineSort, MaintenanceRequest, MaintenanceSession, MergeTraceRequest, NewToken,
    NoteRequest, PinRequest, Problem, ProblemKind, PromoteRequest, Promoted, Removed, RetireRequest,
    RevertScheme, Reverted, SaveTraceRequest, SchemeList, SetCatalog, SetHost, SetMachine, Stats, Status,
    Task, TaskList, TokenList,
};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::HeaderValue;
use hyper::{Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

pub use crate::client::personality::Owner;
use crate::client::server::{Address, ClientFiles, Trust};
use crate::contexts::{Context, Contexts};
use crate::data_dir::DataDir;
use crate::failure::{Unreachable, invalid};

/// Sends requests to one daemon.
#[derive(Clone, Debug)]
pub struct Client(Target);

#[derive(Clone, Debug)]
enum Target {
    /// The daemon of this host, at this socket.
    Local(PathBuf),
    /// A daemon on another host.
    Remote(Arc<Remote>),
}

struct Remote {
    address: Address,
    trust: Trust,
    /// The value of the `Authorization` header, with the token. `None`: the client has a certificate instead.
    authorization: Option<HeaderValue>,
    own: Option<ClientFiles>,
}

impl std::fmt::Debug for Remote {
    /// Prints no token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the daemon that listens on `socket`. Connects with the first request.
    pub fn new(socket: PathBuf) -> Self {
        Self(Target::Local(socket))
    }

    /// A client of a server that the user has logged in to.
    pub fn remote(context: &Context) -> anyhow::Result<Self> {
        let authorization = match context.token.as_str() {
            "" => None,
            token => {
                let mut value: HeaderValue = format!("Bearer {token}").parse()?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let (address, trust, own) = (context.address()?, context.trust(), context.certificate.clone());
        let remote = Remote { address, trust, authorization, own };
        Ok(Self(Target::Remote(Arc::new(remote))))
    }

    /// The client of the named context; or else of the given data directory; or else of the current context.
    pub fn choose(context: Option<&str>, data_dir: Option<PathBuf>) -> anyhow::Result<Self> {
        if context.is_some_and(|name| !name.is_empty()) || data_dir.is_none() {
            let contexts = Contexts::load()?;
            if let Some(context) = contexts.choose(context)? {
                return Self::remote(context);
            }
        }
        Ok(Self::new(DataDir::of_daemon(data_dir)?.socket()))
    }

    /// The daemon's data directory, which has its socket. `None`: the daemon is on another host.
    pub fn data_dir(&self) -> Option<&Path> {
        match &self.0 {
            Target::Local(socket) => Some(socket.parent().unwrap_or(Path::new("."))),
            Target::Remote(_) => None,
        }
    }

    /// Checks that the daemon can open a file. Fails if the daemon is on another host and the path is relative,
    /// because that is relative to a directory of this host.
    pub fn sees(&self, path: &Path) -> anyhow::Result<()> {
        match &self.0 {
            Target::Remote(remote) if path.is_relative() => {
                let (path, host) = (path.display(), &remote.address.host);
                let message =
                    format!("'{path}' is relative to a directory of this host, so {host} cannot open it");
                let advice = format!("copy it to {host}, and give its absolute path there");
                Err(Problem::new(ProblemKind::Invalid, message).advise(advice).into())
            }
            _ => Ok(()),
        }
    }

    /// The identity and permissions that the daemon sees for this client.
    pub async fn caller(&self) -> anyhow::Result<CallerInfo> {
        self.get("/api/v1/caller").await
    }

    /// Begins a login of a person.
    pub async fn begin_login(&self, request: &BeginLogin) -> anyhow::Result<BegunLogin> {
        self.post("/login", request).await
    }

    /// Finishes a login. The answer has the token.
    pub async fn finish_login(&self, request: &FinishLogin) -> anyhow::Result<NewToken> {
        self.post("/login/code", request).await
    }

    /// Ends the login whose token this client has. A token that is of no login stays.
    pub async fn end_login(&self) -> anyhow::Result<()> {
        self.send(Method::DELETE, "/login", None).await.map(drop)
    }

    /// The state of the daemon.
    pub async fn status(&self) -> anyhow::Result<Status> {
        self.get("/api/v1/status").await
    }

    /// The metrics of the host and of machines that are on, or of one machine.
    pub async fn stats(&self, machine: Option<&str>) -> anyhow::Result<Stats> {
        let machine = machine.map(|name| format!("?machine={}", escape(name))).unwrap_or_default();
        self.get(&format!("/api/v1/stats{machine}")).await
    }

    /// All images.
    pub async fn images(&self) -> anyhow::Result<ImageList> {
        self.get("/api/v1/images").await
    }

    /// One image, or one version of it.
    pub async fn image(&self, reference: &str) -> anyhow::Result<Image> {
        self.get(&format!("/api/v1/images/{}", escape(reference))).await
    }

    /// Removes an image or one version of it. `force`: also an image whose channels are set.
    pub async fn remove_image(&self, reference: &str, force: bool) -> anyhow::Result<Removed> {
        let path = format!("/api/v1/images/{}?force={force}", escape(reference));
        json(self.send(Method::DELETE, &path, None).await?).await
    }

    /// Points a channel to a version, now or later.
    pub async fn promote(&self, reference: &str, request: &PromoteRequest) -> anyhow::Result<Promoted> {
        self.post(&format!("/api/v1/images/{}/promotion", escape(reference)), request).await
    }

    /// Cancels a scheduled promotion.
    pub async fn cancel_promotion(&self, image: &str, channel: Channel) -> anyhow::Result<ChannelPointer> {
        let path = format!("/api/v1/images/{}/promotion?channel={channel}", escape(image));
        json(self.send(Method::DELETE, &path, None).await?).await
    }

    /// Points a channel to the version before its current one.
    pub async fn revert(&self, image: &str, request: &ChannelRequest) -> anyhow::Result<Reverted> {
        self.post(&format!("/api/v1/images/{}/revert", escape(image)), request).await
    }

    /// Retires a version, or makes it usable again.
    pub async fn retire(&self, reference: &str, request: &RetireRequest) -> anyhow::Result<ImageVersion> {
        self.post(&format!("/api/v1/images/{}/retire", escape(reference)), request).await
    }

    /// Changes the note of a version.
    pub async fn note(&self, reference: &str, request: &NoteRequest) -> anyhow::Result<ImageVersion> {
        self.post(&format!("/api/v1/images/{}/note", escape(reference)), request).await
    }

    /// Pins a machine to one version.
    pub async fn pin(&self, machine: &str, request: &PinRequest) -> anyhow::Result<Machine> {
        let path = format!("/api/v1/machines/{}/pin", escape(machine));
        json(self.send(Method::PUT, &path, Some(serde_json::to_vec(request)?)).await?).await
    }

    /// Unpins a machine, so that it boots what its image or channel names.
    pub async fn unpin(&self, machine: &str) -> anyhow::Result<Machine> {
        let path = format!("/api/v1/machines/{}/pin", escape(machine));
        json(self.send(Method::DELETE, &path, None).await?).await
    }

    /// A version's boot trace.
    pub async fn trace(&self, reference: &str) -> anyhow::Result<BootTrace> {
        self.get(&format!("/api/v1/images/{}/trace", escape(reference))).await
    }

    /// Merges a boot trace from another host.
    pub async fn merge_trace(
        &self,
        reference: &str,
        request: &MergeTraceRequest,
    ) -> anyhow::Result<BootTrace> {
        self.post(&format!("/api/v1/images/{}/trace/merge", escape(reference)), request).await
    }

    /// Writes a boot trace to a file for another host.
    pub async fn save_trace(&self, reference: &str, request: &SaveTraceRequest) -> anyhow::Result<BootTrace> {
        self.post(&format!("/api/v1/images/{}/trace/save", escape(reference)), request).await
    }

    /// Removes a boot trace.
    pub async fn remove_trace(&self, reference: &str) -> anyhow::Result<BootTrace> {
        let path = format!("/api/v1/images/{}/trace", escape(reference));
        json(self.send(Method::DELETE, &path, None).await?).await
    }

    /// Begins a maintenance session of an image on a machine.
    pub async fn edit(
        &self,
        image: &str,
        request: &MaintenanceRequest,
    ) -> anyhow::Result<MaintenanceSession> {
        self.post(&format!("/api/v1/images/{}/edit", escape(image)), request).await
    }

    /// Discards a maintenance session and its changes.
    pub async fn discard_session(&self, image: &str) -> anyhow::Result<()> {
        let path = format!("/api/v1/images/{}/edit", escape(image));
        self.send(Method::DELETE, &path, None).await.map(drop)
    }

    /// All catalogs.
    pub async fn catalogs(&self) -> anyhow::Result<CatalogList> {
        self.get("/api/v1/catalogs").await
    }

    /// One catalog.
    pub async fn catalog(&self, name: &str) -> anyhow::Result<Catalog> {
        self.get(&format!("/api/v1/catalogs/{}", escape(name))).await
    }

    /// The advice on the sizes of its machines' write caches.
    pub async fn advice(&self, name: &str) -> anyhow::Result<CatalogAdvice> {
        self.get(&format!("/api/v1/catalogs/{}/advice", escape(name))).await
    }

    /// Creates a catalog.
    pub async fn create_catalog(&self, request: &CreateCatalog) -> anyhow::Result<Catalog> {
        self.post("/api/v1/catalogs", request).await
    }

    /// Changes the settings of a catalog.
    pub async fn set_catalog(&self, name: &str, request: &SetCatalog) -> anyhow::Result<Catalog> {
        let path = format!("/api/v1/catalogs/{}", escape(name));
        json(self.send(Method::PATCH, &path, Some(serde_json::to_vec(request)?)).await?).await
    }

    /// The versions of its scheme.
    pub async fn schemes(&self, catalog: &str) -> anyhow::Result<SchemeList> {
        self.get(&format!("/api/v1/catalogs/{}/scheme", escape(catalog))).await
    }

    /// Makes a new version of its scheme with the settings of an earlier one.
    pub async fn revert_scheme(&self, catalog: &str, version: u32) -> anyhow::Result<Catalog> {
        let path = format!("/api/v1/catalogs/{}/scheme/revert", escape(catalog));
        self.post(&path, &RevertScheme { version }).await
    }

    /// Claims a machine of a catalog.
    pub async fn claim(&self, catalog: &str, request: &ClaimRequest) -> anyhow::Result<Claim> {
        self.post(&format!("/api/v1/catalogs/{}/claims", escape(catalog)), request).await
    }

    /// All claims, or those of one catalog.
    pub async fn claims(&self, catalog: Option<&str>) -> anyhow::Result<ClaimList> {
        let catalog = catalog.map(|name| format!("?catalog={}", escape(name))).unwrap_or_default();
        self.get(&format!("/api/v1/claims{catalog}")).await
    }

    /// Ends a claim, by its id or the name of its machine.
    pub async fn release(&self, claim: &str) -> anyhow::Result<Claim> {
        json(self.send(Method::DELETE, &format!("/api/v1/claims/{}", escape(claim)), None).await?).await
    }

    /// Removes a catalog.
    pub async fn remove_catalog(&self, name: &str) -> anyhow::Result<()> {
        self.send(Method::DELETE, &format!("/api/v1/catalogs/{}", escape(name)), None).await.map(drop)
    }

    /// Pins all machines of a catalog to one version.
    pub async fn pin_catalog(&self, name: &str, request: &PinRequest) -> anyhow::Result<Catalog> {
        let path = format!("/api/v1/catalogs/{}/pin", escape(name));
        json(self.send(Method::PUT, &path, Some(serde_json::to_vec(request)?)).await?).await
    }

    /// Unpins all machines of a catalog.
    pub async fn unpin_catalog(&self, name: &str) -> anyhow::Result<Catalog> {
        let path = format!("/api/v1/catalogs/{}/pin", escape(name));
        json(self.send(Method::DELETE, &path, None).await?).await
    }

    /// All machines.
    pub async fn machines(&self) -> anyhow::Result<MachineList> {
        self.machines_like("", MachineSort::Name, None).await
    }

    /// The machines that match a filter. Sends as many requests as there are pages.
    pub async fn machines_like(
        &self,
        filter: &str,
        sort: MachineSort,
        limit: Option<u32>,
    ) -> anyhow::Result<MachineList> {
        // An order that changes all the time cannot be paged, so the machines are sorted here.
        let asked = if sort.is_live() { MachineSort::Name } else { sort };
        let wanted = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        let needed = if sort.is_live() { usize::MAX } else { wanted };
        let mut all = self.machines_after(filter, asked, None, needed).await?;
        while let Some(next) = all.next.take().filter(|_| all.machines.len() < needed) {
            let left = needed - all.machines.len();
            let page = self.machines_after(filter, asked, Some(&next), left).await?;
            all.machines.extend(page.machines);
            (all.total, all.matching, all.next) = (page.total, page.matching, page.next);
        }
        if sort.is_live() {
            sort.sort(&mut all.machines);
            all.machines.truncate(wanted);
        }
        all.next = None;
        Ok(all)
    }

    async fn machines_after(
        &self,
        filter: &str,
        sort: MachineSort,
        after: Option<&str>,
        limit: usize,
    ) -> anyhow::Result<MachineList> {
        let limit = u32::try_from(limit).map(|limit| format!("&limit={limit}")).unwrap_or_default();
        let after = after.map(|after| format!("&after={}", escape(after))).unwrap_or_default();
        self.get(&format!("/api/v1/machines?sort={sort}&filter={}{limit}{after}", escape(filter))).await
    }

    /// One machine.
    pub async fn machine(&self, name: &str) -> anyhow::Result<Machine> {
        self.get(&format!("/api/v1/machines/{}", escape(name))).await
    }

    /// Creates a machine.
    pub async fn create_machine(&self, request: &CreateMachine) -> anyhow::Result<Machine> {
        self.post("/api/v1/machines", request).await
    }

    /// Changes the limits of a machine's write cache.
    pub async fn set_machine(&self, name: &str, limits: &SetMachine) -> anyhow::Result<Machine> {
        let path = format!("/api/v1/machines/{}", escape(name));
        json(self.send(Method::PATCH, &path, Some(serde_json::to_vec(limits)?)).await?).await
    }

    /// Changes the state of a machine. `verb`: `start`, `stop`, `stop?force=true` or `reset`.
    pub async fn change_machine(&self, name: &str, verb: &str) -> anyhow::Result<Machine> {
        let path = format!("/api/v1/machines/{}/{verb}", escape(name));
        json(self.send(Method::POST, &path, None).await?).await
    }

    /// Removes a machine.
    pub async fn remove_machine(&self, name: &str, force: bool) -> anyhow::Result<()> {
        let path = format!("/api/v1/machines/{}?force={force}", escape(name));
        self.send(Method::DELETE, &path, None).await.map(drop)
    }

    /// Runs a command in a guest.
    pub async fn exec(&self, name: &str, request: &ExecRequest) -> anyhow::Result<ExecResult> {
        self.post(&format!("/api/v1/machines/{}/exec", escape(name)), request).await
    }

    /// What uses the space of a machine's write cache, by file and process of the guest.
    pub async fn cache_contents(&self, name: &str) -> anyhow::Result<CacheContents> {
        self.get(&format!("/api/v1/machines/{}/cache/contents", escape(name))).await
    }

    /// The machine's screen as a PNG.
    pub async fn screenshot(&self, name: &str) -> anyhow::Result<Bytes> {
        let path = format!("/api/v1/machines/{}/screenshot", escape(name));
        let answer = self.send(Method::GET, &path, None).await?.into_body();
        Ok(answer.collect().await.context("the answer with the picture ended early")?.to_bytes())
    }

    /// The newest tasks. Sends as many requests as there are pages.
    pub async fn tasks(&self, unended: bool, limit: u32) -> anyhow::Result<TaskList> {
        let (mut all, mut left, mut from) = (TaskList { tasks: Vec::new() }, limit, String::new());
        loop {
            let asked = left.min(MAX_TASKS);
            let mut page: TaskList =
                self.get(&format!("/api/v1/tasks?unended={unended}&limit={asked}{from}")).await?;
            let given = u32::try_from(page.tasks.len()).unwrap_or(u32::MAX);
            let Some(last) = page.tasks.last() else { return Ok(all) };
            from = format!("&before={}", last.id);
            all.tasks.append(&mut page.tasks);
            left = left.saturating_sub(given);
            if left == 0 {
                return Ok(all);
            }
        }
    }

    /// One task.
    pub async fn task(&self, id: i64) -> anyhow::Result<Task> {
        self.get(&format!("/api/v1/tasks/{id}")).await
    }

    /// Requests the cancellation of a task.
    pub async fn cancel_task(&self, id: i64) -> anyhow::Result<Task> {
        json(self.send(Method::POST, &format!("/api/v1/tasks/{id}/cancel"), None).await?).await
    }

    /// All hosts.
    pub async fn hosts(&self) -> anyhow::Result<HostList> {
        self.get("/api/v1/hosts").await
    }

    /// One host.
    pub async fn host(&self, name: &str) -> anyhow::Result<Host> {
        self.get(&format!("/api/v1/hosts/{}", escape(name))).await
    }

    /// Cordons or uncordons a host.
    pub async fn set_host(&self, name: &str, request: SetHost) -> anyhow::Result<Host> {
        let path = format!("/api/v1/hosts/{}", escape(name));
        json(self.send(Method::PATCH, &path, Some(serde_json::to_vec(&request)?)).await?).await
    }

    /// Accepts the node of a host that has seen newer data than the controller's database, which was restored from an
    /// old copy.
    pub async fn accept_host(&self, name: &str) -> anyhow::Result<Host> {
        let path = format!("/api/v1/hosts/{}/accept", escape(name));
        json(self.send(Method::POST, &path, None).await?).await
    }

    /// Removes a host.
    pub async fn remove_host(&self, name: &str, force: bool) -> anyhow::Result<()> {
        let path = format!("/api/v1/hosts/{}?force={force}", escape(name));
        self.send(Method::DELETE, &path, None).await.map(drop)
    }

    /// Creates a token with which a node joins.
    pub async fn create_join_token(&self, request: &CreateJoinToken) -> anyhow::Result<JoinToken> {
        self.post("/api/v1/join-tokens", request).await
    }

    /// Creates a token.
    pub async fn create_token(&self, request: &CreateToken) -> anyhow::Result<NewToken> {
        self.post("/api/v1/tokens", request).await
    }

    /// All tokens.
    pub async fn tokens(&self) -> anyhow::Result<TokenList> {
        self.get("/api/v1/tokens").await
    }

    /// Creates a link to the web console.
    pub async fn console_link(&self, request: &CreateConsoleTicket) -> anyhow::Result<ConsoleLink> {
        self.post("/api/v1/console/tickets", request).await
    }

    /// Revokes a token.
    pub async fn revoke_token(&self, name: &str) -> anyhow::Result<()> {
        self.send(Method::DELETE, &format!("/api/v1/tokens/{}", escape(name)), None).await.map(drop)
    }

    /// The newest events, or the newest of those older than `before`. Sends as many requests as there are pages.
    pub async fn events(
        &self,
        subject: Option<&str>,
        mut before: Option<i64>,
        limit: u32,
    ) -> anyhow::Result<EventList> {
        let subject = subject.map(|subject| format!("&subject={}", escape(subject))).unwrap_or_default();
        let (mut all, mut left) = (EventList { events: Vec::new() }, limit);
        loop {
            let asked = left.min(MAX_EVENTS);
            let from = before.map(|before| format!("&before={before}")).unwrap_or_default();
            let mut page: EventList =
                self.get(&format!("/api/v1/events?limit={asked}{subject}{from}")).await?;
            let given = u32::try_from(page.events.len()).unwrap_or(u32::MAX);
            before = page.events.last().map(|event| event.id);
            all.events.append(&mut page.events);
            left = left.saturating_sub(given);
            // An answer may have fewer events than requested, because its size is limited.
            if left == 0 || given == 0 {
                return Ok(all);
            }
        }
    }

    /// The events after the given one, oldest first. The daemon waits some seconds for an event if there is none.
    pub async fn events_after(&self, subject: Option<&str>, after: i64) -> anyhow::Result<EventList> {
        let subject = subject.map(|subject| format!("&subject={}", escape(subject))).unwrap_or_default();
        self.get(&format!("/api/v1/events?limit={MAX_EVENTS}&wait_s=30&after={after}{subject}")).await
    }

    /// The lines of the audit after the event with this id, oldest first. Empty: there are no more.
    pub async fn audit_after(&self, after: i64) -> anyhow::Result<String> {
        let response = self.send(Method::GET, &format!("/api/v1/audit?after={after}"), None).await?;
        let body = response.into_body().collect().await.context("the daemon's answer ended early")?;
        String::from_utf8(body.to_bytes().into()).context("the daemon's answer is not text")
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        json(self.send(Method::GET, path, None).await?).await
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        json(self.send(Method::POST, path, Some(serde_json::to_vec(body)?)).await?).await
    }

    /// Sends a request. Fails with the problem of the answer if its status is an error.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> anyhow::Result<Response<Incoming>> {
        // With an empty name, the path would be that of the whole list.
        if path.split('?').next().is_some_and(|path| path.ends_with('/') || path.contains("//")) {
            return Err(invalid("a name in the request is empty"));
        }
        let mut request = self.request(method, path);
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default())))?;
        let response = self.exchange(request).await?;
        if response.status().is_success() { Ok(response) } else { Err(refused(response).await) }
    }

    /// A request with the headers for the host and the token.
    fn request(&self, method: Method, path: &str) -> hyper::http::request::Builder {
        let request = Request::builder().method(method).uri(path);
        match &self.0 {
            Target::Local(_) => request.header(header::HOST, "localhost"),
            Target::Remote(remote) => {
                let request = request.header(header::HOST, remote.address.authority());
                match &remote.authorization {
                    Some(value) => request.header(header::AUTHORIZATION, value.clone()),
                    None => request,
                }
            }
        }
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Response<Incoming>> {
        let socket = match &self.0 {
            Target::Local(socket) => socket,
            Target::Remote(remote) if remote.address.is_encrypted => {
                let stream = server::connect(&remote.address, &remote.trust, remote.own.as_ref()).await?;
                return exchange(stream, request, &remote.address.url()).await;
            }
            Target::Remote(remote) => {
                let stream = server::connect_plain(&remote.address).await?;
                return exchange(stream, request, &remote.address.url()).await;
            }
        };
        let unreachable = |e: std::io::Error| {
            let reason = match e.kind() {
                std::io::ErrorKind::NotFound => "the socket does not exist".to_owned(),
                std::io::ErrorKind::ConnectionRefused => "nothing listens at this address".to_owned(),
                _ => e.to_string(),
            };
            let advice = if e.kind() == std::io::ErrorKind::PermissionDenied {
                "only its owner and members of its group may use it: use sudo, or become a member ('sudo adduser USER headwater' for \
                 the service of the package, then log in again), or name your own --data-dir"
            } else {
                "start it with 'headwater serve', or name its --data-dir"
            };
            Unreachable { socket: socket.display().to_string(), reason, advice }
        };
        let stream = UnixStream::connect(socket).await.map_err(unreachable)?;
        exchange(stream, request, &socket.display().to_string()).await
    }
}

/// Sends a request over a new connection.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
    to: &str,
) -> anyhow::Result<Response<Incoming>> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .context("cannot speak HTTP with the daemon")?;
    tokio::spawn(async move {
        // An error of the connection also fails the answer, where it is handled.
        let _ = connection.with_upgrades().await;
    });
    let sent = sender.send_request(request).await;
    sent.with_context(|| format!("the daemon at {to} closed the connection before it answered"))
}

/// The problem in the body of an answer.
async fn refused(response: Response<Incoming>) -> anyhow::Error {
    let status = response.status();
    let Ok(body) = response.into_body().collect().await else {
        return anyhow::anyhow!("the daemon's answer ended early");
    };
    serde_json::from_slice::<Problem>(&body.to_bytes())
        .unwrap_or_else(|_| Problem::new(ProblemKind::Failed, format!("the daemon answered {status}")))
        .into()
}

async fn json<T: DeserializeOwned>(response: Response<Incoming>) -> anyhow::Result<T> {
    let bytes = response.into_body().collect().await.context("the daemon's answer ended early")?.to_bytes();
    serde_json::from_slice(&bytes)
        .context("cannot parse the daemon's answer: the daemon may be another version of headwater")
}

/// Percent-encodes a name for a path or a parameter.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'@') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    // Alone these would be relative path segments, even if percent-encoded dots follow.
    if matches!(out.as_str(), "." | "..") { out.replace('.', "%2E") } else { out }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_stay_one_part_of_the_path() {
        assert_eq!(escape("debian-12.x@3"), "debian-12.x@3");
        assert_eq!(escape("a/b c?d#e%"), "a%2Fb%20c%3Fd%23e%25");
        assert_eq!(escape(".."), "%2E%2E");
    }
}
