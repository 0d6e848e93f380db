//! Tickets, sessions and what the console refuses, over real connections.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::sessions::TICKET_MS;
use super::*;
use crate::caller::Caller;
use crate::lifecycle::tests::Fixture;
use crate::operations;

/// A console that is served, and the service behind it.
struct Served {
    fixture: Fixture,
    address: SocketAddr,
    _stop: watch::Sender<bool>,
}

/// An answer: status, head in lower case, body.
struct Answer(u16, String, String);

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.2).unwrap_or_else(|e| panic!("{:?} is no JSON: {e}", self.2))
    }
}

impl Served {
    async fn start() -> Self {
        let fixture = Fixture::new().await;
        let port = Port::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        let address = port.address().unwrap();
        let (stop, stopped) = watch::channel(false);
        let router = operations::router(fixture.service.clone());
        tokio::spawn(serve(port, router, fixture.service.clone(), stopped));
        let served = Self { fixture, address, _stop: stop };
        assert_eq!(served.get("/", "").await.0, 200);
        served
    }

    /// Asks with this Host and further headers, each with its line end.
    async fn ask(&self, line: &str, host: &str, headers: &str, body: &str) -> Answer {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = body.len();
        let head = format!(
            "{line} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
        );
        stream.write_all(format!("{head}{headers}\r\n{body}").as_bytes()).await.unwrap();
        let mut answer = String::new();
        let reading = stream.read_to_string(&mut answer);
        tokio::time::timeout(Duration::from_secs(60), reading).await.unwrap().unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer(status, head.to_lowercase(), body.to_owned())
    }

    async fn get(&self, path: &str, headers: &str) -> Answer {
        self.ask(&format!("GET {path}"), &self.address.to_string(), headers, "").await
    }

    fn ticket(&self, role: Role) -> String {
        self.fixture.service.make_ticket(&Caller::admin("uid 1000 (anna)"), role).unwrap().0
    }

    async fn exchange(&self, ticket: &str) -> Answer {
        let body = serde_json::json!({ "ticket": ticket }).to_string();
        self.ask("POST /session", &self.address.to_string(), "", &body).await
    }

    /// The header of a new session.
    async fn session(&self, role: Role) -> String {
        let opened = self.exchange(&self.ticket(role)).await.json();
        format!("authorization: Bearer {}\r\n", opened["secret"].as_str().unwrap())
    }

    fn later(&self, ms: u64) {
        self.fixture.pass_ms(ms);
    }
}

#[tokio::test]
async fn a_ticket_opens_one_session() {
    let served = Served::start().await;
    let ticket = served.ticket(Role::Operator);
    let opened = served.exchange(&ticket).await;
    assert_eq!(opened.0, 200, "{}", opened.2);
    let opened = opened.json();
    assert_eq!(
        (&opened["role"], &opened["principal"]),
        (&"operator".into(), &"console of uid 1000 (anna)".into())
    );
    let session = format!("authorization: Bearer {}\r\n", opened["secret"].as_str().unwrap());
    assert_eq!(served.get("/api/v1/machines", &session).await.0, 200);
    let again = served.exchange(&ticket).await;
    assert_eq!((again.0, &again.json()["kind"]), (401, &"unauthorized".into()));
    // Neither is the ticket a session, nor the secret a ticket.
    assert_eq!(served.get("/api/v1/machines", &format!("authorization: Bearer {ticket}\r\n")).await.0, 401);
    assert_eq!(served.exchange(opened["secret"].as_str().unwrap()).await.0, 401);
}

#[tokio::test]
async fn tickets_end_after_a_minute() {
    let served = Served::start().await;
    // From here on the clock stands still.
    served.later(0);
    let (in_time, late) = (served.ticket(Role::Viewer), served.ticket(Role::Viewer));
    served.later(TICKET_MS - 1);
    assert_eq!(served.exchange(&in_time).await.0, 200);
    served.later(1);
    assert_eq!(served.exchange(&late).await.0, 401);
}

#[tokio::test]
async fn sessions_end_by_disuse_by_age_and_at_will() {
    let served = Served::start().await;
    let (used, unused, closed) = (
        served.session(Role::Viewer).await,
        served.session(Role::Viewer).await,
        served.session(Role::Viewer).await,
    );
    let host = served.address.to_string();
    assert_eq!(served.ask("DELETE /session", &host, &closed, "").await.0, 204);
    assert_eq!(served.get("/api/v1/machines", &closed).await.0, 401);
    let minutes = |minutes: u64| minutes * 60_000;
    served.later(minutes(29));
    assert_eq!(served.get("/api/v1/machines", &used).await.0, 200);
    served.later(minutes(1));
    assert_eq!(served.get("/api/v1/machines", &unused).await.0, 401);
    // 30 minutes after 29 are 59; 12 hours are 24 of these.
    for _ in 0..23 {
        assert_eq!(served.get("/api/v1/machines", &used).await.0, 200);
        served.later(minutes(29));
    }
    assert_eq!(served.get("/api/v1/machines", &used).await.0, 200);
    served.later(minutes(29));
    assert_eq!(served.get("/api/v1/machines", &used).await.0, 401);
}

#[tokio::test]
async fn a_session_may_do_what_its_role_may() {
    let served = Served::start().await;
    let (viewer, operator) = (served.session(Role::Viewer).await, served.session(Role::Operator).await);
    let host = served.address.to_string();
    let start =
        async |session: &str| served.ask("POST /api/v1/machines/none/start", &host, session, "").await.0;
    assert_eq!((start(&viewer).await, start(&operator).await), (403, 404));
    assert_eq!(served.get("/api/v1/tokens", &operator).await.0, 403);
    assert_eq!(served.get("/api/v1/machines", "").await.0, 401);
    let metrics = served.fixture.service.make_ticket(&Caller::daemon(), Role::Metrics);
    assert!(matches!(metrics, Err(TicketError::Role)), "{metrics:?}");
}

#[tokio::test]
async fn other_hosts_and_origins_are_refused() {
    let served = Served::start().await;
    let session = served.session(Role::Admin).await;
    let port = served.address.port();
    let own = [format!("127.0.0.1:{port}"), format!("localhost:{port}")];
    for host in &own {
        let origin = format!("{session}origin: http://{host}\r\nsec-fetch-site: same-origin\r\n");
        assert_eq!(served.ask("GET /api/v1/machines", host, &origin, "").await.0, 200, "{host}");
    }
    let foreign = [format!("evil.example:{port}"), "127.0.0.1".to_owned(), format!("127.0.0.1:{}", port ^ 1)];
    for host in &foreign {
        for path in ["/", "/app.js", "/api/v1/machines"] {
            let refused = served.ask(&format!("GET {path}"), host, &session, "").await;
            assert_eq!(refused.0, 400, "{host} {path}");
        }
    }
    let two_hosts = format!("{session}host: evil.example\r\n");
    assert_eq!(served.get("/api/v1/machines", &two_hosts).await.0, 400);
    for origin in
        ["http://evil.example", "null", &format!("https://{}", own[0]), &format!("http://{}", own[1])]
    {
        let headers = format!("{session}origin: {origin}\r\n");
        assert_eq!(served.get("/api/v1/machines", &headers).await.0, 400, "{origin}");
    }
    let ticket = served.ticket(Role::Admin);
    let body = serde_json::json!({ "ticket": ticket }).to_string();
    let cross_site = served.ask("POST /session", &own[0], "sec-fetch-site: cross-site\r\n", &body).await;
    assert_eq!(cross_site.0, 400);
    // The page itself may be opened by a link, and the ticket is still there.
    assert_eq!(served.get("/", "sec-fetch-site: cross-site\r\n").await.0, 200);
    assert_eq!(served.exchange(&ticket).await.0, 200);
}

#[tokio::test]
async fn without_an_identity_provider_nobody_logs_in() {
    let served = Served::start().await;
    let host = served.address.to_string();
    assert_eq!(served.get("/login", "").await.json(), serde_json::json!({}));
    let body = serde_json::json!({ "redirect": format!("http://{host}/") }).to_string();
    let refused = served.ask("POST /login", &host, "", &body).await;
    assert_eq!((refused.0, &refused.json()["kind"]), (400, &"invalid".into()));
    assert!(refused.2.contains("it has no identity provider") && refused.2.contains("--oidc-issuer"));
    let body = serde_json::json!({ "secret": "hwl_1", "code": "2", "redirect": "" }).to_string();
    assert_eq!(served.ask("POST /login/code", &host, "", &body).await.0, 400);
    // Another site could otherwise begin a login.
    let cross_site = served.ask("POST /login", &host, "sec-fetch-site: cross-site\r\n", &body).await;
    assert!(cross_site.2.contains("another site caused the request"), "{}", cross_site.2);
}

#[tokio::test]
async fn every_answer_forbids_foreign_content() {
    let served = Served::start().await;
    let session = served.session(Role::Viewer).await;
    for path in ["/", "/app.js", "/app.css", "/icon.svg", "/api/v1/machines", "/nothing"] {
        for headers in ["", &*session] {
            let Answer(_, head, _) = served.get(path, headers).await;
            assert!(
                head.contains("\ncontent-security-policy: default-src 'none'; script-src 'self'; "),
                "{path}: {head}"
            );
            assert!(
                !head.contains("unsafe") && head.contains("\nx-content-type-options: nosniff"),
                "{path}: {head}"
            );
            assert!(
                !head.contains("set-cookie") && head.contains("\nreferrer-policy: no-referrer"),
                "{path}: {head}"
            );
        }
    }
    let page = served.get("/", "").await;
    let tag = page.1.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
    assert_eq!(served.get("/", &format!("if-none-match: {tag}\r\n")).await.0, 304);
    assert!(served.get("/api/v1/machines", &session).await.1.contains("\ncache-control: no-store"));
}

#[tokio::test]
async fn links_that_nobody_opens_are_bounded() {
    let served = Served::start().await;
    for _ in 0..64 {
        served.ticket(Role::Viewer);
    }
    let service = &served.fixture.service;
    assert!(matches!(service.make_ticket(&Caller::daemon(), Role::Viewer), Err(TicketError::TooMany)));
    served.later(TICKET_MS);
    assert_eq!(served.exchange(&served.ticket(Role::Viewer)).await.0, 200);
}

/// What begins a WebSocket.
const WEBSOCKET: &str = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
     sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

impl Served {
    /// The status and the answer to a WebSocket with these protocols, as text as far as it is.
    async fn websocket(&self, path: &str, protocols: &str, more: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let host = self.address;
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: {host}\r\n{WEBSOCKET}sec-websocket-protocol: {protocols}\r\n{more}\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
        let reading = async {
            // Until the close frame, or the end of a refusal.
            while !answer.contains(&0x88) && !answer.ends_with(b"}") {
                match stream.read(&mut piece).await.unwrap() {
                    0 => return,
                    n => answer.extend_from_slice(&piece[..n]),
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), reading).await.unwrap();
        let text = String::from_utf8_lossy(&answer).into_owned();
        (text.split(' ').nth(1).unwrap().parse().unwrap(), text)
    }
}

#[tokio::test]
async fn a_ticket_attaches_to_one_console_once() {
    let served = Served::start().await;
    let service = &served.fixture.service;
    let caller = Caller::admin("uid 1000 (anna)");
    let lab = service.record("lab").await.unwrap();
    let make = || service.make_machine_ticket(&caller, &lab, MachineSocket::Console);
    assert!(matches!(make(), Err(TicketError::NoConsole)));
    service
        .is_reached_at(Reachable { console: Some("http://127.0.0.1/".to_owned()), ..Reachable::default() });
    let ticket = || make().unwrap().ticket;
    let own = ticket();
    let (status, text) = served.websocket("/console", &format!("headwater-console, {own}"), "").await;
    assert_eq!(status, 101, "{text}");
    assert!(text.to_lowercase().contains("\nsec-websocket-protocol: headwater-console\r"), "{text}");
    // A page does not see why a WebSocket is refused, so the reason is in the close frame.
    assert!(text.contains("machine 'lab': it is"), "{text}");
    for protocols in
        [format!("headwater-console, {own}"), "headwater-console".to_owned(), "hwc_00".to_owned()]
    {
        let (status, text) = served.websocket("/console", &protocols, "").await;
        assert_eq!(status, 401, "{protocols}: {text}");
    }
    let fresh = ticket();
    let foreign = served
        .websocket("/console", &format!("headwater-console, {fresh}"), "origin: http://evil.example\r\n")
        .await;
    assert_eq!(foreign.0, 400, "{}", foreign.1);
    assert_eq!(served.get("/console", "").await.0, 400);
    served.later(TICKET_MS);
    assert_eq!(served.websocket("/console", &format!("headwater-console, {fresh}"), "").await.0, 401);
    let viewer = served.session(Role::Viewer).await;
    let host = served.address.to_string();
    let asked = served.ask("POST /api/v1/machines/pc/console/ticket", &host, &viewer, "").await;
    assert_eq!(asked.0, 403, "{}", asked.2);
}

#[tokio::test]
async fn a_ticket_opens_one_display_once_and_no_console() {
    let served = Served::start().await;
    let service = &served.fixture.service;
    let caller = Caller::admin("uid 1000 (anna)");
    let lab = service.record("lab").await.unwrap();
    let make = |socket| service.make_machine_ticket(&caller, &lab, socket);
    assert!(matches!(make(MachineSocket::Display), Err(TicketError::NoConsole)));
    service
        .is_reached_at(Reachable { console: Some("http://127.0.0.1/".to_owned()), ..Reachable::default() });
    let ticket = || make(MachineSocket::Display).unwrap().ticket;
    let own = format!("headwater-display, {}", ticket());
    let (status, text) = served.websocket("/display", &own, "").await;
    assert_eq!(status, 101, "{text}");
    assert!(text.to_lowercase().contains("\nsec-websocket-protocol: headwater-display\r"), "{text}");
    assert!(text.contains("machine 'lab': it is"), "{text}");
    assert_eq!(served.websocket("/display", &own, "").await.0, 401);
    // Another machine with the name of one that was removed.
    let removed = headwater_db::MachineRecord { uuid: uuid::Uuid::from_u128(7), ..lab.clone() };
    let ticket_of_removed = service.make_machine_ticket(&caller, &removed, MachineSocket::Display).unwrap();
    let protocols = format!("headwater-display, {}", ticket_of_removed.ticket);
    let (_, text) = served.websocket("/display", &protocols, "").await;
    assert!(text.contains("there is no machine 'lab'"), "{text}");
    // The tickets of consoles and of displays are not each other's.
    let console = make(MachineSocket::Console).unwrap().ticket;
    assert_eq!(served.websocket("/display", &format!("headwater-display, {console}"), "").await.0, 401);
    assert_eq!(served.websocket("/console", &format!("headwater-console, {}", ticket()), "").await.0, 401);
    let fresh = format!("headwater-display, {}", ticket());
    let foreign = served.websocket("/display", &fresh, "origin: http://evil.example\r\n").await;
    assert_eq!(foreign.0, 400, "{}", foreign.1);
    served.later(TICKET_MS);
    assert_eq!(served.websocket("/display", &fresh, "").await.0, 401);
    let viewer = served.session(Role::Viewer).await;
    let host = served.address.to_string();
    let asked = served.ask("POST /api/v1/machines/pc/display/ticket", &host, &viewer, "").await;
    assert_eq!(asked.0, 403, "{}", asked.2);
}
