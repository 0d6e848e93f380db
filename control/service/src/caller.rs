//! Identifies the caller of a request, and checks its permissions.
//!
//! A request through the unix socket comes from the daemon's owner, who has all permissions. A request over TCP carries a
//! token: that of the data directory, which has all permissions too, a named token with a role, or the secret of a session
//! of the web console. The role that an operation needs is declared with its route, as the scope of its security
//! requirement: what the OpenAPI description says is enforced.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::RequestPartsExt;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use headwater_api::{Problem, ProblemKind, Role, Scopes};
use utoipa::openapi::OpenApi;

use crate::Service;
use crate::answer::Failure;
use crate::fleet::node::OfController;
use crate::scope::ScopeRule;

/// The name of the security scheme of all operations.
pub(crate) const SCHEME: &str = "token";

/// The other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A process on this host, through the socket.
    Unix {
        /// The user id of the process, if the kernel reported it.
        uid: Option<u32>,
    },
    /// A client of the TCP port.
    Tcp(SocketAddr),
}

/// The token of a request over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Presented {
    /// The token of the data directory.
    OfDirectory,
    /// A named token.
    Named {
        /// Its name.
        name: String,
        /// Its role.
        role: Role,
        /// The catalogs and images to which it is limited.
        scopes: Option<Scopes>,
    },
    /// The secret of a session of the web console.
    Session {
        /// The caller that opened it.
        principal: String,
        /// Its role.
        role: Role,
    },
}

/// The file with the users of this host. Users of a directory service appear by number only, because looking up their names
/// may take long.
const USERS: &str = "/etc/passwd";

/// The longest user name that is shown. With the number, it must fit into the author field of a store (256 bytes).
const NAME_MAX_BYTES: usize = 200;

/// The name of a user in the text of `passwd(5)`.
fn name_of(uid: u32, users: &str) -> Option<&str> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        let is_plain =
            !name.is_empty() && name.len() <= NAME_MAX_BYTES && name.chars().all(|c| c.is_ascii_graphic());
        (number.parse() == Ok(uid) && is_plain).then_some(name)
    })
}

/// The caller of a request: its name in the history, and its permissions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// `uid 1000 (anna)`, `token grafana`, `console of uid 1000 (anna)`, `tcp 127.0.0.1:5000` or `daemon`.
    pub(crate) principal: String,
    /// The caller's role.
    pub(crate) role: Role,
    /// The catalogs and images to which the caller is limited. `None`: no limit.
    pub(crate) scopes: Option<Scopes>,
}

impl Caller {
    /// A caller with all permissions.
    pub(crate) fn admin(principal: impl Into<String>) -> Self {
        Self { principal: principal.into(), role: Role::Admin, scopes: None }
    }

    /// The daemon itself.
    pub(crate) fn daemon() -> Self {
        Self::admin("daemon")
    }

    /// Whether the caller may see user data, which may contain passwords.
    pub(crate) fn sees_user_data(&self) -> bool {
        self.role >= Role::Operator
    }

    async fn of(parts: &Parts) -> Self {
        if let Some(OfController(caller)) = parts.extensions.get::<OfController>() {
            return caller.clone();
        }
        match (parts.extensions.get::<ConnectInfo<Peer>>(), parts.extensions.get::<Presented>()) {
            (Some(ConnectInfo(Peer::Unix { uid: Some(uid) })), _) => {
                let users = tokio::fs::read_to_string(USERS).await.unwrap_or_default();
                match name_of(*uid, &users) {
                    Some(name) => Self::admin(format!("uid {uid} ({name})")),
                    None => Self::admin(format!("uid {uid}")),
                }
            }
            (Some(ConnectInfo(Peer::Unix { uid: None })), _) => Self::admin("unknown"),
            (Some(ConnectInfo(Peer::Tcp(_))), Some(Presented::Named { name, role, scopes })) => {
                Self { principal: format!("token {name}"), role: *role, scopes: scopes.clone() }
            }
            (Some(ConnectInfo(Peer::Tcp(_))), Some(Presented::Session { principal, role })) => {
                Self { principal: principal.clone(), role: *role, scopes: None }
            }
            (Some(ConnectInfo(Peer::Tcp(address))), Some(Presented::OfDirectory)) => {
                Self::admin(format!("tcp {address}"))
            }
            // Cannot happen: servers refuse such requests.
            _ => Self { principal: "unknown".to_owned(), role: Role::Metrics, scopes: None },
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        if let Some(caller) = parts.extensions.get::<Self>() {
            return Ok(caller.clone());
        }
        Ok(Self::of(parts).await)
    }
}

/// Repeated refusals of one operation to one caller are recorded at most this often.
const NOTE_INTERVAL: Duration = Duration::from_secs(60);

/// The most refusals that are remembered.
const REFUSALS_MAX: usize = 1000;

/// The role and the scope that each operation needs, by path and method, and the latest refusals.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    operations: Arc<HashMap<(String, Method), (Role, ScopeRule)>>,
    refused: Arc<Mutex<HashMap<(String, String), Instant>>>,
}

impl Needs {
    /// Reads the security requirements of an OpenAPI description. Operations without one, or with an unknown role, get no
    /// entry.
    pub(crate) fn of(described: &OpenApi) -> Self {
        let mut needs = HashMap::new();
        for (path, item) in &described.paths.paths {
            let operations = [
                (Method::GET, &item.get),
                (Method::PUT, &item.put),
                (Method::POST, &item.post),
                (Method::PATCH, &item.patch),
                (Method::DELETE, &item.delete),
            ];
            for (method, operation) in operations {
                let security = operation.as_ref().and_then(|operation| operation.security.as_ref());
                let needed = security.and_then(|security| {
                    let value = serde_json::to_value(security).ok()?;
                    let needed = &value[0][SCHEME];
                    let rule = ScopeRule::of(path, needed[1].as_str());
                    Some((Role::parse(needed[0].as_str()?).ok()?, rule))
                });
                if let Some(needed) = needed {
                    needs.insert((path.clone(), method), needed);
                }
            }
        }
        Self { operations: Arc::new(needs), refused: Arc::default() }
    }

    /// Whether a refusal is recorded: the first one of an interval is.
    fn is_to_be_noted(&self, principal: &str, asked: &str) -> bool {
        let now = Instant::now();
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.len() >= REFUSALS_MAX {
            refused.retain(|_, at| now.duration_since(*at) < NOTE_INTERVAL);
        }
        let last = refused.get(&(principal.to_owned(), asked.to_owned()));
        if last.is_some_and(|at| now.duration_since(*at) < NOTE_INTERVAL) || refused.len() >= REFUSALS_MAX {
            return false;
        }
        refused.insert((principal.to_owned(), asked.to_owned()), now);
        true
    }

    fn of_operation(&self, path: &str, method: &Method) -> Option<(Role, ScopeRule)> {
        // Axum routes HEAD to the handler of GET.
        let method = if method == Method::HEAD { Method::GET } else { method.clone() };
        self.operations.get(&(path.to_owned(), method)).copied()
    }
}

/// Lets a request through if its caller has the role and the scopes that it needs. A refusal is recorded in the history.
pub(crate) async fn authorize(
    State((service, needs)): State<(Service, Needs)>,
    request: Request,
    next: Next,
) -> Response {
    let Some(path) = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()) else {
        // The path does not exist, which is no secret.
        return next.run(request).await;
    };
    let (mut parts, body) = request.into_parts();
    let caller = Caller::of(&parts).await;
    // Without an entry, only an admin passes, and the router then refuses the method.
    let needed = needs.of_operation(&path, &parts.method).unwrap_or((Role::Admin, ScopeRule::Everything));
    let asked = format!("{} {path}", parts.method);
    if let Err(problem) = permit(&service, &caller, needed, &mut parts).await {
        note_refusal(&service, &needs, &caller, &asked, &problem.message).await;
        return Failure(problem).into_response();
    }
    parts.extensions.insert(caller.clone());
    let response = next.run(Request::from_parts(parts, body)).await;
    if response.status() == StatusCode::FORBIDDEN {
        note_refusal(
            &service,
            &needs,
            &caller,
            &asked,
            "the subject of the request is not within the caller's scopes",
        )
        .await;
    }
    response
}

/// Fails if the caller's role is too low, or if its scopes do not contain the subject that the path names.
async fn permit(
    service: &Service,
    caller: &Caller,
    (role, rule): (Role, ScopeRule),
    parts: &mut Parts,
) -> Result<(), Problem> {
    if caller.role < role {
        let message = format!("{} has the role {}, and this needs {role}", caller.principal, caller.role);
        let problem = Problem::new(ProblemKind::Forbidden, message);
        return Err(problem.advise("ask for a token with that role: 'headwater token create'"));
    }
    if caller.scopes.is_none() || rule == ScopeRule::OfHandler {
        return Ok(());
    }
    if rule == ScopeRule::Everything {
        return caller.must_have_everything();
    }
    let unreadable = |_| Problem::new(ProblemKind::Invalid, "the path of the request cannot be read");
    let parameters = parts.extract::<RawPathParams>().await.map_err(unreadable)?;
    service.must_have_path(caller, parameters.iter()).await
}

/// Records a refusal in the history. Repetitions are not recorded, because they would push out other events.
async fn note_refusal(service: &Service, needs: &Needs, caller: &Caller, asked: &str, why: &str) {
    if needs.is_to_be_noted(&caller.principal, asked) {
        tracing::warn!(caller = %caller.principal, role = %caller.role, "refused: {asked}");
        let event = service.event(caller, "daemon".to_owned(), "refused", format!("{asked}: {why}"));
        service.note(event).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_number() {
        let users = "root:x:0:0:root:/root:/bin/bash\n# odd\n\nanna:x:1000:1000::/home/anna:/bin/sh\n+::::::\nb ob:x:7:7:::\n";
        assert_eq!(name_of(0, users), Some("root"));
        assert_eq!(name_of(1000, users), Some("anna"));
        for nobody in [1, 7, 100] {
            assert_eq!(name_of(nobody, users), None);
        }
    }
}
