//! The paths of the web listener.

use super::caller::WebCaller;
use super::cluster;
use super::family::Form;
use super::hosts::Hosts;
use super::metrics;
use super::site::Site;
use bytes::Bytes;
use fastps_core::error::Kind;
use http::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HOST, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
/// State for callers that may not read everything, or foreign pages: the reason can name tensors.
const NOT_READY: &str = "a shard does not serve yet, or no more; a reader of everything sees why";
const PATHS: &str = "/metrics, /healthz, /readyz, /version and /api/v1/cluster";

type Answer = Response<Full<Bytes>>;

fn respond(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    answer
}

fn refuse(status: StatusCode, why: &str) -> Answer {
    respond(status, TEXT, format!("{why}\n"))
}

/// Answers a request.
pub(super) fn answer<B>(request: &Request<B>, site: &Site, caller: &WebCaller) -> Answer {
    let is_foreign = !is_known(request, &site.hosts);
    if is_foreign && !is_health(request) {
        let why = "the Host header names another server: expected an address, localhost, or a name of --web-host, --listen, --advertise or --cluster";
        return refuse(StatusCode::MISDIRECTED_REQUEST, why);
    }
    if let Some(refusal) = refusal(request, &site.hosts).or_else(|| unknown(request, site, caller)) {
        return refusal;
    }
    let subject = &site.subject;
    match request.uri().path() {
        "/metrics" => {
            let form = Form::wanted(text(request.headers(), &ACCEPT).unwrap_or_default());
            match metrics::text(subject, form) {
                Ok(body) => respond(StatusCode::OK, form.content_type(), body),
                Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
            }
        }
        "/healthz" => respond(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => match subject.trouble() {
            None => respond(StatusCode::OK, TEXT, "ok\n".to_owned()),
            Some(trouble) => {
                let headers = request.headers();
                let may_know =
                    !is_foreign && !caller.is_bare(headers, site) && caller.check(headers, site).is_ok();
                refuse(StatusCode::SERVICE_UNAVAILABLE, if may_know { &trouble } else { NOT_READY })
            }
        },
        "/version" => {
            respond(StatusCode::OK, JSON, format!("{{\"version\":\"{}\"}}\n", env!("CARGO_PKG_VERSION")))
        }
        "/api/v1/cluster" => respond(StatusCode::OK, JSON, cluster::json(subject)),
        _ => refuse(StatusCode::NOT_FOUND, &format!("there is no such path; there are {PATHS}")),
    }
}

/// Refuses a caller that may not read everything. Health is for everybody.
fn unknown<B>(request: &Request<B>, site: &Site, caller: &WebCaller) -> Option<Answer> {
    if is_health(request) {
        return None;
    }
    let error = caller.check(request.headers(), site).err()?;
    if error.kind != Kind::Unauthenticated {
        return Some(refuse(StatusCode::FORBIDDEN, &error.to_string()));
    }
    let mut answer = refuse(StatusCode::UNAUTHORIZED, &error.to_string());
    answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    Some(answer)
}

fn text<'a>(headers: &'a HeaderMap, name: &http::HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Health is for everybody, by every name: probes choose their `Host` header.
fn is_health<B>(request: &Request<B>) -> bool {
    matches!(request.uri().path(), "/healthz" | "/readyz")
}

/// Returns whether the one `Host` header names this listener.
fn is_known<B>(request: &Request<B>, hosts: &Hosts) -> bool {
    let mut given = request.headers().get_all(HOST).iter();
    let host = given.next().and_then(|host| host.to_str().ok());
    given.next().is_none() && host.is_some_and(|host| hosts.knows(host))
}

/// Refuses requests that could change something, and those of foreign pages.
fn refusal<B>(request: &Request<B>, hosts: &Hosts) -> Option<Answer> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut answer =
            refuse(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD: nothing can be changed here");
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return Some(answer);
    }
    let headers = request.headers();
    let is_own = |origin| hosts.is_own(origin, text(headers, &HOST));
    if headers.contains_key(ORIGIN) && !text(headers, &ORIGIN).is_some_and(is_own) {
        return Some(refuse(StatusCode::FORBIDDEN, "requests of foreign pages are refused"));
    }
    None
}
