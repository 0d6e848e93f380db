//! Forwards requests that only a machine's node can answer (exec, users, console, screenshot, contents of the write cache, seal) from the
//! controller to that node. It is a layer of the API's router. Start, stop and other changes are in `remote.rs`.

use axum::RequestPartsExt;
use axum::body::Body;
use axum::extract::{MatchedPath, RawPathParams, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use headwater_api::ProblemKind;
use hyper::ext::Protocol;
use hyper_util::rt::TokioIo;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::fleet::link::Link;
use crate::fleet::node::{self, CONSOLE};
use crate::operations::seal_machine::must_have_images;

/// Requests that only the node of a machine can answer.
const FORWARDED: [(&str, &Method); 6] = [
    ("/api/v1/machines/{machine}/exec", &Method::POST),
    ("/api/v1/machines/{machine}/users", &Method::GET),
    ("/api/v1/machines/{machine}/console", &Method::GET),
    ("/api/v1/machines/{machine}/screenshot", &Method::GET),
    ("/api/v1/machines/{machine}/cache/contents", &Method::GET),
    (SEAL, &Method::POST),
];

const SEAL: &str = "/api/v1/machines/{machine}/seal";

/// The path of the interactive console.
const ATTACH: &str = "/api/v1/machines/{machine}/console/attach";

/// Forwards a request to the node that has its machine, or passes it on to the local handler. The caller was authorized.
pub(crate) async fn forward(State(service): State<Service>, request: Request, next: Next) -> Response {
    let Some(path) = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()) else {
        return next.run(request).await;
    };
    if let Some(problem) = node::kept_elsewhere(&service, &request, &path) {
        return Failure(problem).into_response();
    }
    let is_forwarded = FORWARDED.iter().any(|(its, method)| *its == path && *method == request.method());
    if !is_forwarded && path != ATTACH {
        return next.run(request).await;
    }
    let (mut parts, body) = request.into_parts();
    let Ok(caller) = parts.extract::<Caller>().await;
    let parameters = parts.extract::<RawPathParams>().await;
    let name = parameters.ok().and_then(|all| {
        all.iter().find(|(name, _)| *name == "machine").map(|(_, machine)| machine.to_owned())
    });
    let request = Request::from_parts(parts, body);
    let Some(name) = name else { return next.run(request).await };
    // The node knows no scopes.
    if path == SEAL
        && let Err(failure) = must_have_images(&service, &caller, &name).await
    {
        return failure.into_response();
    }
    let what = if path == ATTACH { "attach to the console of" } else { "use" };
    let link = match service.node_of(&name, what).await {
        Ok(Some(link)) => link,
        Ok(None) => return next.run(request).await,
        Err(error) => return Failure::from(error).into_response(),
    };
    if request.method() != Method::GET
        && let Err(error) = service.must_have_database().await
    {
        return Failure::from(error).into_response();
    }
    let sent = if path == ATTACH {
        attach(&link, &caller, request).await
    } else {
        send(&link, &caller, request).await
    };
    sent.unwrap_or_else(IntoResponse::into_response)
}

async fn send(link: &Link, caller: &Caller, request: Request) -> Result<Response, Failure> {
    let path = path_of(&request);
    let method = request.method().clone();
    let body = Body::new(request.into_body());
    let answer = link.send(caller, method, &path, body).await.map_err(Failure)?;
    Ok(answer.map(Body::new).into_response())
}

/// Attaches to a console. An HTTP/1.1 upgrade becomes an HTTP/2 `CONNECT` with the name of the protocol.
async fn attach(link: &Link, caller: &Caller, mut request: Request) -> Result<Response, Failure> {
    let asked = request.headers().get(header::UPGRADE).cloned();
    if asked != Some(HeaderValue::from_static(CONSOLE)) {
        let message = "the console needs a connection that is upgraded to headwater-console";
        return Err(Failure(headwater_api::Problem::new(ProblemKind::Invalid, message)));
    }
    let mut there = link.request(Method::CONNECT, &path_of(&request), Body::empty()).map_err(Failure)?;
    there.extensions_mut().insert(Protocol::from_static(CONSOLE));
    let mut answer = link.send_request(caller, there).await.map_err(Failure)?;
    if answer.status() != StatusCode::OK {
        return Ok(answer.map(Body::new).into_response());
    }
    let here = hyper::upgrade::on(&mut request);
    let there = hyper::upgrade::on(&mut answer);
    tokio::spawn(async move {
        match tokio::try_join!(here, there) {
            // If either side disconnects, the copy ends; nobody is left to be informed.
            Ok((here, there)) => {
                let (mut here, mut there) = (TokioIo::new(here), TokioIo::new(there));
                let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
            }
            Err(error) => tracing::debug!("a client did not take its console: {error}"),
        }
    });
    let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, CONSOLE)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers, Body::empty()).into_response())
}

fn path_of(request: &Request) -> String {
    request.uri().path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string)
}
