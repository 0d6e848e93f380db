//! Axum extractors for requests, which report errors as [`Problem`] instead of plain text.

use axum::Json;
use axum::body::Bytes;
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

/// An optional JSON body.
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

/// The query parameters.
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
