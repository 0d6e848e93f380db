//! Finds which of the rights that this program needs its identity lacks on a resource group.

use serde_json::Value;

use crate::arm::Arm;
use crate::arm::resources::Scope;
use crate::error::AzureError;

const GROUP_API: &str = "2021-04-01";
const PERMISSIONS_API: &str = "2022-04-01";

/// The rights for publishing images.
pub const NEEDED: [&str; 15] = [
    "Microsoft.Resources/subscriptions/resourceGroups/read",
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/disks/write",
    "Microsoft.Compute/disks/delete",
    "Microsoft.Compute/disks/beginGetAccess/action",
    "Microsoft.Compute/disks/endGetAccess/action",
    "Microsoft.Compute/galleries/read",
    "Microsoft.Compute/galleries/write",
    "Microsoft.Compute/galleries/delete",
    "Microsoft.Compute/galleries/images/read",
    "Microsoft.Compute/galleries/images/write",
    "Microsoft.Compute/galleries/images/delete",
    "Microsoft.Compute/galleries/images/versions/read",
    "Microsoft.Compute/galleries/images/versions/write",
    "Microsoft.Compute/galleries/images/versions/delete",
];

/// The region of the resource group, which must exist.
pub async fn group_region(arm: &Arm, scope: &Scope) -> Result<String, AzureError> {
    let path = scope.group_path();
    // The service distinguishes a missing group from a missing subscription, so `find` is not enough.
    let there = arm.read(&path, GROUP_API).await?;
    Ok(there.get("location").and_then(Value::as_str).unwrap_or_default().to_owned())
}

/// Those of the rights that the identity lacks on the resource group.
pub async fn lacking(arm: &Arm, scope: &Scope) -> Result<Vec<&'static str>, AzureError> {
    let path = format!("{}/providers/Microsoft.Authorization/permissions", scope.group_path());
    let permissions = arm.list(&path, PERMISSIONS_API, "").await?;
    Ok(NEEDED.into_iter().filter(|right| !permissions.iter().any(|one| allows(one, right))).collect())
}

/// Whether a permission contains a right: one of its actions does, and none of its exceptions.
fn allows(permission: &Value, right: &str) -> bool {
    let any = |field: &str| {
        let patterns = permission.get(field).and_then(Value::as_array);
        patterns.is_some_and(|patterns| {
            patterns.iter().filter_map(Value::as_str).any(|pattern| matches(pattern, right))
        })
    };
    any("actions") && !any("notActions")
}

/// Whether a pattern, in which `*` stands for any text, matches a right. Case does not matter.
fn matches(pattern: &str, right: &str) -> bool {
    let (pattern, right) = (pattern.to_ascii_lowercase(), right.to_ascii_lowercase());
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == right };
    let Some(mut left) = right.strip_prefix(start) else { return false };
    let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*').filter(|part| !part.is_empty()) {
        match left.split_once(part) {
            Some((_, after)) => left = after,
            None => return false,
        }
    }
    left.ends_with(end)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patterns_of_rights_have_wildcards() {
        let right = "Microsoft.Compute/disks/beginGetAccess/action";
        for pattern in [
            "*",
            "Microsoft.Compute/*",
            "microsoft.compute/disks/*/action",
            "*/action",
            "Microsoft.*/disks/begin*/action",
            right,
        ] {
            assert!(matches(pattern, right), "{pattern}");
        }
        for pattern in ["*/read", "Microsoft.Network/*", "Microsoft.Compute/disks", "*/disks/end*/action", ""]
        {
            assert!(!matches(pattern, right), "{pattern}");
        }
        // The text before and after the wildcard must not overlap.
        assert!(!matches("a/b*b/c", "a/b/c"));
    }

    #[test]
    fn exceptions_count_within_their_permission_only() {
        let reader = json!({"actions": ["*/read"], "notActions": []});
        let contributor = json!({"actions": ["*"], "notActions": ["Microsoft.Compute/disks/*"]});
        assert!(allows(&reader, "Microsoft.Compute/disks/read"));
        assert!(!allows(&reader, "Microsoft.Compute/disks/write"));
        assert!(!allows(&contributor, "Microsoft.Compute/disks/read"));
        assert!(allows(&contributor, "Microsoft.Compute/galleries/write"));
    }
}
