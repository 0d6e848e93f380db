//! Converts refusals and failures of Azure Resource Manager to errors with advice.

use serde_json::Value;

use crate::error::{AzureError, AzureErrorKind};
use crate::http::Answer;

/// The longest text of Azure that is shown, in characters.
const MESSAGE_MAX_CHARS: usize = 400;

/// The URL for polling an operation: the first of these headers that the answer has.
pub(super) fn operation_url(answer: &Answer) -> Option<String> {
    let header = answer.header("azure-asyncoperation").or_else(|| answer.header("location"));
    header.map(str::to_owned)
}

/// The error of a refused request.
pub(super) fn refused(action: &str, answer: &Answer) -> AzureError {
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let kind = match answer.status.as_u16() {
        401 | 403 => AzureErrorKind::Denied,
        404 => AzureErrorKind::NotFound,
        409 => AzureErrorKind::Busy,
        412 => AzureErrorKind::Exists,
        _ => AzureErrorKind::Invalid,
    };
    explained(action, kind, &format!("Azure answers {}", answer.status), &body)
}

/// Whether a 404 is about the resource itself. `Ok`: it does not exist. A 404 about its resource group or subscription, which may be
/// another one than before, or not visible to the identity any more, does not say so.
pub(super) fn missing(action: &str, answer: &Answer) -> Result<(), AzureError> {
    let error = refused(action, answer);
    match error.code() {
        Some("ResourceGroupNotFound" | "SubscriptionNotFound" | "InvalidSubscriptionId") => Err(error),
        _ => Ok(()),
    }
}

/// The error of an operation or a resource that has failed.
pub(super) fn failed(action: &str, said: &Value) -> AzureError {
    explained(action, AzureErrorKind::Failed, "Azure could not finish it", said)
}

fn explained(action: &str, kind: AzureErrorKind, what: &str, body: &Value) -> AzureError {
    let text =
        |name: &str| body.pointer(&format!("/error/{name}")).and_then(Value::as_str).unwrap_or_default();
    let (code, message) = (text("code"), text("message"));
    let shown: String = message.chars().filter(|c| !c.is_control()).take(MESSAGE_MAX_CHARS).collect();
    let is_quota = message.to_ascii_lowercase().contains("quota");
    let (kind, advice) = match code {
        "QuotaExceeded" => {
            (AzureErrorKind::Quota, Some("use a size of another family, or ask Azure for more quota"))
        }
        "OperationNotAllowed" if is_quota => {
            (AzureErrorKind::Quota, Some("use a size of another family, or ask Azure for more quota"))
        }
        "AllocationFailed"
        | "ZonalAllocationFailed"
        | "OverconstrainedAllocationRequest"
        | "OverconstrainedZonalAllocationRequest" => {
            (AzureErrorKind::Capacity, Some("use another zone or size, or try again later"))
        }
        "SkuNotAvailable" => (AzureErrorKind::NotOffered, Some("use another size, zone or region")),
        // Azure also sends it for requests that it will never execute, so a retry is useless.
        "OperationNotAllowed" | "PropertyChangeNotAllowed" if kind == AzureErrorKind::Busy => {
            (AzureErrorKind::Invalid, None)
        }
        "NicReservedForAnotherVm" | "NicInUse" | "OperationPreempted" => (AzureErrorKind::Busy, None),
        "AuthorizationFailed" => (
            AzureErrorKind::Denied,
            Some("give the identity the role that the message names, on the resource group"),
        ),
        "SubscriptionNotFound" | "InvalidSubscriptionId" => (
            AzureErrorKind::NotFound,
            Some("check that the subscription belongs to the tenant, and that the identity has a role in it"),
        ),
        "InvalidAuthenticationTokenTenant" => (
            AzureErrorKind::Denied,
            Some(
                "the subscription belongs to another tenant: check the tenant and the subscription of the connection",
            ),
        ),
        "CannotDeleteResource" => {
            (AzureErrorKind::Exists, Some("remove the resources in it first, such as versions of the image"))
        }
        "ResourceGroupNotFound" => (AzureErrorKind::NotFound, Some("create the resource group first")),
        // Later requests of this kind get the same answer until somebody registers the provider.
        "MissingSubscriptionRegistration" => (
            AzureErrorKind::Denied,
            Some(
                "register the provider that the message names: 'az provider register --namespace NAMESPACE --wait'",
            ),
        ),
        _ => (kind, None),
    };
    let error = if code.is_empty() {
        AzureError::new(kind, format!("{action}: {what} (no error code): {shown}"))
    } else {
        AzureError::new(kind, format!("{action}: {what} ({code}): {shown}")).coded(code)
    };
    match advice {
        Some(advice) => error.advise(advice),
        None => error,
    }
}
