//! Reading requests: axum's extractors, with our errors instead of plain text.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::Json;
use axum::body::Bytes;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use headwater_api::{Problem, ProblemKind};
use serde::de::DeserializeOwned;

use crate::answer::Failure;

/// A JSON body.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let Json(value) = Json::from_request(request, state)
            .await
            .map_err(|e: JsonRejection| refused("the request's body", e.body_text()))?;
        Ok(Self(value))
    }
}

/// A JSON body, where there is one.
pub(crate) struct MaybeBody<T>(pub(crate) Option<T>);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for MaybeBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let bytes = Bytes::from_request(request, state)
            .await
            .map_err(|e: BytesRejection| refused("the request's body", e.body_text()))?;
        if bytes.is_empty() {
            return Ok(Self(None));
        }
        let value = Json::from_bytes(&bytes);
        let Json(value) = value.map_err(|e: JsonRejection| refused("the request's body", e.body_text()))?;
        Ok(Self(Some(value)))
    }
}

/// Parameters after the `?`.
pub(crate) struct Parameters<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Query(value) = Query::from_request_parts(parts, state)
            .await
            .map_err(|e: QueryRejection| refused("the request's parameters", e.body_text()))?;
        Ok(Self(value))
    }
}

/// The name in the path.
pub(crate) struct Name(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Path(name) = Path::from_request_parts(parts, state)
            .await
            .map_err(|e: PathRejection| refused("the request's path", e.body_text()))?;
        Ok(Self(name))
    }
}

fn refused(what: &str, why: String) -> Failure {
    Failure(Problem::new(ProblemKind::Invalid, why).during(format!("cannot read {what}")))
}

/// The other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A process on this host, through the socket.
    Unix {
        /// Its user, where the kernel said so.
        uid: Option<u32>,
    },
    /// A client of the TCP port.
    Tcp(SocketAddr),
}

/// Users of this host. One of a directory service is known by number alone, since asking for the name may take long.
const USERS: &str = "/etc/passwd";

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

/// The longest name of a user that is shown: with the number it is to fit where a store keeps authors (256 bytes).
const NAME_MAX_BYTES: usize = 200;

/// Who asks, as the history names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Actor(pub(crate) String);

impl Actor {
    /// The daemon itself.
    pub(crate) fn daemon() -> Self {
        Self("daemon".to_owned())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Actor {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let name = match parts.extensions.get::<ConnectInfo<Peer>>() {
            Some(ConnectInfo(Peer::Unix { uid: Some(uid) })) => {
                let users = tokio::fs::read_to_string(USERS).await.unwrap_or_default();
                match name_of(*uid, &users) {
                    Some(name) => format!("uid {uid} ({name})"),
                    None => format!("uid {uid}"),
                }
            }
            Some(ConnectInfo(Peer::Tcp(address))) => format!("tcp {address}"),
            Some(ConnectInfo(Peer::Unix { uid: None })) | None => "unknown".to_owned(),
        };
        Ok(Self(name))
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
