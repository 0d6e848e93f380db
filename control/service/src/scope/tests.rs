//! Requests of callers with scopes: each operation, each list, and each name in a body.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use headwater_api::{CacheMode, CacheSettings, Filter, ResetOn, Role, Scopes};
use headwater_db::{CatalogRecord, ClaimRecord, MachineRecord, NewEvent, NewTask};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};

use super::*;
use crate::fleet::node::OfController;
use crate::lifecycle::tests::Fixture;
use crate::operations;

/// The mark of an operation that needs a caller without scopes, whatever its path names.
const EVERYTHING: &str = "everything";

/// Subjects of tasks and events. The caller of these tests may see the first ones.
const OWN: [&str; 4] = ["catalog mine", "image image", "image image@1", "machine pc-mine"];
const FOREIGN: [&str; 8] = [
    "catalog theirs",
    "image other:test",
    "machine pc-theirs",
    "machine loner-theirs",
    "machine gone",
    "store /images",
    "daemon",
    "token mine",
];

struct World {
    fixture: Fixture,
    claims: [Uuid; 2],
    /// The numbers of the tasks, in the order of the subjects.
    tasks: Vec<i64>,
}

impl World {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let service = &fixture.service;
        let lab = service.record("lab").await.unwrap();
        let mut repo = service.db().write().await.unwrap();
        for (name, image) in [("mine", "image"), ("theirs", "image")] {
            repo.catalogs().add(&catalog(name, image)).await.unwrap();
        }
        let mut claims = Vec::new();
        for (n, (name, catalog, image)) in [
            ("pc-mine", Some("mine"), "image"),
            ("pc-theirs", Some("theirs"), "image"),
            ("loner-mine", None, "image:test"),
            ("loner-theirs", None, "other"),
        ]
        .into_iter()
        .enumerate()
        {
            let machine = MachineRecord {
                uuid: Uuid::from_u128(100 + u128::try_from(n).unwrap()),
                name: name.to_owned(),
                mac: format!("52:54:00:00:00:{n:02x}"),
                image: image.to_owned(),
                catalog: catalog.map(str::to_owned),
                ..lab.clone()
            };
            repo.machines().add(&machine).await.unwrap();
            if machine.catalog.is_some() {
                let claim = claim(&machine);
                repo.claims().add(&claim).await.unwrap();
                claims.push(claim.id);
            }
        }
        let mut tasks = Vec::new();
        for subject in OWN.into_iter().chain(FOREIGN) {
            let (subject, caller) = (subject.to_owned(), "token other".to_owned());
            let event = NewEvent {
                at_ms: 5,
                caller: caller.clone(),
                subject: subject.clone(),
                action: "set".into(),
                detail: String::new(),
                change: None,
            };
            repo.events().append(event).await.unwrap();
            let task = NewTask { kind: "verify", subject, caller, plan: None, created_at_ms: 5 };
            tasks.push(repo.tasks().add(&task).await.unwrap());
        }
        repo.save().await.unwrap();
        let claims = [claims[0], claims[1]];
        Self { fixture, claims, tasks }
    }

    /// The status and the answer to an administrator of the catalog `mine` and the image `image`.
    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let scopes = Scopes { catalogs: vec!["mine".to_owned()], images: vec!["image".to_owned()] };
        let caller = Caller { principal: "token anna".to_owned(), role: Role::Admin, scopes: Some(scopes) };
        self.ask_as(caller, method, path, body).await
    }

    /// The status and the answer to a caller.
    async fn ask_as(&self, caller: Caller, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let mut request = request.body(body).unwrap();
        request.extensions_mut().insert(OfController(caller));
        let router = TowerToHyperService::new(operations::router(self.fixture.service.clone()));
        let answer = tokio::time::timeout(Duration::from_secs(60), router.call(request)).await;
        let answer = answer.unwrap_or_else(|_| panic!("{path} is not answered")).unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.ask(Method::GET, path, None).await
    }

    /// All that requests can change, apart from the history.
    async fn state(&self) -> String {
        let mut repo = self.fixture.service.db().read().await.unwrap();
        let machines = repo.machines().list().await.unwrap();
        let catalogs = repo.catalogs().list().await.unwrap();
        let claims = repo.claims().list().await.unwrap();
        let tasks = repo.tasks().older(i64::MAX, 1000).await.unwrap();
        let tokens = repo.tokens().list().await.unwrap();
        let disks = repo.persistent_disks().list().await.unwrap();
        format!("{machines:?} {catalogs:?} {claims:?} {tasks:?} {tokens:?} {disks:?}")
    }

    /// A path whose parameters are filled in.
    fn path(&self, template: &str, is_own: bool) -> String {
        let choose = |own: &str, foreign: &str| if is_own { own.to_owned() } else { foreign.to_owned() };
        template
            .replace("{catalog}", &choose("mine", "theirs"))
            .replace("{image}", &choose("image@1", "other@1"))
            .replace("{machine}", &choose("pc-mine", "pc-theirs"))
            .replace("{task}", &self.tasks[if is_own { 0 } else { OWN.len() }].to_string())
            .replace("{claim}", &self.claims[usize::from(!is_own)].to_string())
            .replace("{host}", "own")
            .replace("{token}", "mine")
    }
}

fn catalog(name: &str, image: &str) -> CatalogRecord {
    CatalogRecord {
        name: name.to_owned(),
        image: image.to_owned(),
        pin: None,
        scheme: 1,
        cache: CacheSettings { mode: CacheMode::Ram, ..CacheSettings::default() },
        transport: headwater_api::DiskTransport::default(),
        memory_bytes: 1 << 29,
        cpus: 1,
        platform: headwater_api::platform::Platform::default(),
        user_data: None,
        name_rule: format!("{name}-##"),
        first_number: 1,
        keep_ready: 0,
        ready_hours: None,
        stop_idle_s: 0,
        on_host_loss: headwater_api::OnHostLoss::Wait,
        cloud: None,
        seal_removes: Vec::new(),
        created_at_ms: 0,
    }
}

fn claim(machine: &MachineRecord) -> ClaimRecord {
    ClaimRecord {
        id: Uuid::from_u128(machine.uuid.as_u128() + 1000),
        machine: machine.uuid,
        holder: "anna".to_owned(),
        key: None,
        claimed_by: "token other".to_owned(),
        created_at_ms: 5,
        expires_at_ms: None,
        reset_on: ResetOn::Shutdown,
        ended: None,
    }
}

/// Each operation: its method, its path and its mark.
fn all() -> Vec<(Method, String, Option<String>)> {
    let described = serde_json::to_value(operations::openapi()).unwrap();
    let mut all = Vec::new();
    for (path, methods) in described["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let mark = operation["security"][0]["token"][1].as_str().map(str::to_owned);
            all.push((method.to_uppercase().parse().unwrap(), path.clone(), mark));
        }
    }
    assert!(all.len() > 60, "{}", all.len());
    all
}

#[test]
fn each_operation_says_what_scopes_it_needs() {
    let mut of_handler = Vec::new();
    for (method, path, mark) in all() {
        let is_owned = OWNED.iter().any(|name| path.contains(&format!("{{{name}}}")));
        let is_known = mark.as_deref().is_none_or(|mark| [SCOPED, EVERYTHING].contains(&mark));
        assert!(is_known && (is_owned || mark.is_some()), "{method} {path} has the mark {mark:?}");
        if mark.as_deref() == Some(SCOPED) {
            of_handler.push(format!("{method} {path}"));
        }
    }
    // Each change of this list is a decision about a handler.
    assert_eq!(
        of_handler,
        [
            "GET /api/v1/caller",
            "GET /api/v1/catalogs",
            "POST /api/v1/catalogs",
            "GET /api/v1/claims",
            "GET /api/v1/events",
            "GET /api/v1/images",
            "GET /api/v1/machines",
            "POST /api/v1/machines",
            "GET /api/v1/openapi.json",
            "GET /api/v1/stats",
            "GET /api/v1/status",
            "GET /api/v1/tasks",
        ]
    );
    assert_eq!(ScopeRule::of("/api/v1/later", None), ScopeRule::Everything);
    assert_eq!(ScopeRule::of("/api/v1/later/{catalog}", Some("unknown")), ScopeRule::Everything);
}

#[tokio::test]
async fn each_operation_is_refused_outside_of_the_scopes() {
    let world = World::new().await;
    let before = world.state().await;
    for (method, template, mark) in all() {
        if mark.as_deref() == Some(SCOPED) {
            continue;
        }
        // A caller with scopes is refused even if the path names what is theirs.
        let needs_everything = mark.is_some();
        let path = world.path(&template, needs_everything);
        let (status, answer) = world.ask(method.clone(), &path, None).await;
        let message = answer["message"].as_str().unwrap_or_default();
        let needed = match &template {
            _ if needs_everything => "a caller without scopes",
            it if it.contains("{image}") => "image:other",
            _ => "catalog:theirs",
        };
        let is_named = message.ends_with(&format!("this operation needs {needed}"));
        assert!(
            status == 403 && answer["kind"] == "forbidden" && is_named,
            "{method} {path}: {status} {answer}"
        );
    }
    for path in ["machines/loner-theirs/start", "machines/loner-theirs/exec"] {
        let (status, answer) = world.ask(Method::POST, &format!("/api/v1/{path}"), None).await;
        assert!(
            status == 403 && answer["message"].as_str().unwrap().ends_with("image:other"),
            "{path}: {answer}"
        );
    }
    assert_eq!(world.state().await, before);
    let refused = Filter::parse_for_events("action:refused").unwrap();
    let window = headwater_db::repository::EventWindow::Before(i64::MAX);
    let mut repo = world.fixture.service.db().read().await.unwrap();
    let noted = repo.events().page(&refused, None, window, 1000).await.unwrap();
    assert!(
        noted
            .iter()
            .any(|event| event.detail.starts_with("POST /api/v1/machines/{machine}/start: token anna"))
    );
}

#[tokio::test]
async fn each_operation_is_open_within_the_scopes() {
    let world = World::new().await;
    let mut asked = 0;
    for (method, template, mark) in all() {
        // These go on until somebody ends them.
        let is_endless = template.ends_with("/follow") || template.ends_with("/attach");
        if method != Method::GET || mark.as_deref() == Some(EVERYTHING) || is_endless {
            continue;
        }
        let query = if template.ends_with("/stats") { "?machine=pc-mine" } else { "" };
        let (status, answer) = world.get(&(world.path(&template, true) + query)).await;
        assert_ne!(status, 403, "{template}: {answer}");
        asked += 1;
    }
    assert!(asked > 15, "{asked}");
    for (path, task) in OWN.iter().zip(&world.tasks) {
        assert_eq!(world.get(&format!("/api/v1/tasks/{task}")).await.0, 200, "{path}");
    }
    for (path, task) in FOREIGN.iter().zip(&world.tasks[OWN.len()..]) {
        assert_eq!(world.get(&format!("/api/v1/tasks/{task}")).await.0, 403, "{path}");
    }
    for absent in ["machines/nobody", "tasks/9999"] {
        assert_eq!(world.get(&format!("/api/v1/{absent}")).await.0, 404, "{absent}");
    }
    let new = json!({ "name": "new", "image": "image" });
    let (status, answer) = world.ask(Method::POST, "/api/v1/machines", Some(new)).await;
    assert_eq!(status, 201, "{answer}");
}

#[tokio::test]
async fn lists_have_only_what_the_caller_may_see() {
    let world = World::new().await;
    let names = async |path: &str, list: &str, name: &str| {
        let (status, answer) = world.get(path).await;
        assert_eq!(status, 200, "{path}: {answer}");
        let rows = answer[list].as_array().unwrap().iter().map(|row| row[name].as_str().unwrap().to_owned());
        let mut names: Vec<String> = rows.collect();
        names.sort();
        names
    };
    let machines = ["lab", "loner-mine", "pc-mine"];
    assert_eq!(names("/api/v1/machines", "machines", "name").await, machines);
    for filter in ["-name:x", "-version:old", "name:*", "catalog:theirs,mine", "-catalog:mine"] {
        let found = names(&format!("/api/v1/machines?filter={filter}"), "machines", "name").await;
        assert!(found.iter().all(|name| machines.contains(&name.as_str())), "{filter}: {found:?}");
    }
    let (_, page) = world.get("/api/v1/machines?filter=name:pc-*").await;
    assert_eq!((&page["total"], &page["matching"]), (&json!(3), &json!(1)));
    assert_eq!(names("/api/v1/catalogs", "catalogs", "name").await, ["mine"]);
    assert_eq!(names("/api/v1/images", "images", "name").await, ["image"]);
    assert_eq!(names("/api/v1/claims", "claims", "machine").await, ["pc-mine"]);
    assert!(names("/api/v1/claims?catalog=theirs", "claims", "machine").await.is_empty());
    assert_eq!(names("/api/v1/tasks", "tasks", "subject").await, OWN);
    assert_eq!(names("/api/v1/events", "events", "subject").await, OWN);
    assert_eq!(names("/api/v1/events?after=0", "events", "subject").await, OWN);
    assert!(names("/api/v1/events?subject=machine%20pc-theirs", "events", "subject").await.is_empty());
    let (_, status) = world.get("/api/v1/status").await;
    assert_eq!((&status["machines"], status.get("images")), (&json!(3), None));
    let (_, own) = world.get("/api/v1/caller").await;
    assert_eq!(own["scopes"], json!({ "catalogs": ["mine"], "images": ["image"] }));
}

#[tokio::test]
async fn nobody_outside_of_the_scopes_is_named_as_touched_by_damage() {
    let world = World::new().await;
    let verify = "/api/v1/images/image@1/verify";
    let (status, report) = world.ask_as(Caller::admin("uid 0"), Method::POST, verify, None).await;
    assert!(status == 200 && report.to_string().contains("theirs"), "{status} {report}");
    let alarms = world.fixture.service.damage().alarms();
    assert!(alarms[0].message.contains("theirs"), "{alarms:?}");
    let (_, list) = world.get("/api/v1/tasks?limit=1").await;
    let id = list["tasks"][0]["id"].to_string();
    let paths =
        [format!("tasks/{id}"), format!("tasks/{id}/follow"), "tasks?limit=1".into(), "status".into()];
    for path in paths {
        let (status, answer) = world.get(&format!("/api/v1/{path}")).await;
        let text = answer.to_string();
        assert!(status == 200 && text.contains("damaged") && !text.contains("theirs"), "{path}: {answer}");
    }
}

#[tokio::test]
async fn an_event_of_an_earlier_machine_of_the_name_is_not_shown() {
    let world = World::new().await;
    let mut repo = world.fixture.service.db().write().await.unwrap();
    let machine = repo.machines().by_name("loner-mine").await.unwrap().unwrap();
    repo.machines().remove(machine.uuid).await.unwrap();
    let later = MachineRecord { name: "gone".to_owned(), created_at_ms: 6, ..machine };
    repo.machines().add(&later).await.unwrap();
    repo.save().await.unwrap();
    let (_, events) = world.get("/api/v1/events?subject=machine%20gone").await;
    assert_eq!(events["events"], json!([]));
    let at = FOREIGN.iter().position(|subject| *subject == "machine gone").unwrap();
    let task = world.tasks[OWN.len() + at];
    assert_eq!(world.get(&format!("/api/v1/tasks/{task}")).await.0, 403);
}

#[tokio::test]
async fn names_in_bodies_and_queries_must_be_in_scope() {
    let world = World::new().await;
    let before = world.state().await;
    for (method, path, body, needed) in [
        (Method::POST, "machines", json!({ "name": "new", "image": "other" }), "image:other"),
        (Method::POST, "machines", json!({ "name": "new", "catalog": "theirs" }), "catalog:theirs"),
        (Method::POST, "catalogs", json!({ "name": "theirs-2", "image": "image" }), "catalog:theirs-2"),
        (Method::POST, "catalogs", json!({ "name": "mine", "image": "other@1" }), "image:other"),
        (Method::PATCH, "catalogs/mine", json!({ "image": "other:test" }), "image:other"),
        (Method::POST, "images/image/edit", json!({ "machine": "pc-theirs" }), "catalog:theirs"),
        (Method::POST, "images/image@1/diff", json!({ "with": "other@1" }), "image:other"),
        (Method::GET, "stats", Value::Null, "a caller without scopes"),
        (Method::GET, "stats?machine=pc-theirs", Value::Null, "catalog:theirs"),
    ] {
        let (status, answer) = world.ask(method, &format!("/api/v1/{path}"), Some(body)).await;
        let is_named = answer["message"].as_str().is_some_and(|it| it.ends_with(&format!("needs {needed}")));
        assert!(status == 403 && is_named, "{path}: {status} {answer}");
    }
    assert_eq!(world.state().await, before);
}
